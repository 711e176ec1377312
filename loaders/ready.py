"""Batches that are ready or under way, in order: as many as smooth out the waits, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch

T = TypeVar("T")

_MOST = 64
# After so many batches without a wait one less is kept ready.
_PATIENCE = 500


class ReadyQueue(Generic[T]):
    """`least` batches at any time; more, up to `max_bytes` of them, while the consumer has to wait.

    Nobody is left waiting by `close()`.
    """

    def __init__(self, least: int, max_bytes: int) -> None:
        self._least = least
        self._max_bytes = max_bytes
        self._target = least
        self._calm = 0
        self._batch_bytes = 0
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: T) -> bool:
        """Waits for room; False when nobody listens any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._room())
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def take(self) -> T | None:
        """The next one; None when closed."""
        with self._changed:
            if not self._items:
                self._target, self._calm = min(2 * self._target, _MOST), 0
                self._changed.notify_all()
            else:
                self._calm += 1
                if self._calm > _PATIENCE:
                    self._target, self._calm = max(self._target - 1, self._least), 0
            self._changed.wait_for(lambda: self._closed or self._items)
            if not self._items:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def weighed(self, batch_bytes: int) -> None:
        """What a batch of those that are made now takes in memory."""
        with self._changed:
            self._batch_bytes = batch_bytes

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _room(self) -> int:
        if not self._batch_bytes:
            return self._least
        return max(1, min(self._target, self._max_bytes // self._batch_bytes))


def size_of(batch: Any) -> int:
    """Bytes of the tensors, arrays and byte strings in a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, np.ndarray):
        return batch.nbytes
    if isinstance(batch, bytes | str):
        return len(batch)
    if isinstance(batch, Mapping):
        return sum(size_of(value) for value in batch.values())
    if isinstance(batch, Sequence):
        return sum(size_of(value) for value in batch)
    return 0
