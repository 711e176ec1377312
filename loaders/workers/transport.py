"""Batches from one process to another: what is large lies in memory that both map, and is used again.

The child writes a batch into a slot, a memfd (memfd_create(2)) of its own, and sends the descriptor the
first time. The trainer's tensors are views of that memory; when the last is gone, the slot is free again.
Nothing has a name, so that nothing outlives the processes (F20).
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forebay.loaders.loans import Loans

_ALIGN = 64
# Free slots that a child keeps.
_KEPT = 8


@dataclass(frozen=True)
class Parcel:
    """`spans`: (offset, bytes) of each buffer in the slot. `is_new`: its descriptor follows. `gone`: slots
    that will not be used again."""

    pickled: bytes
    spans: list[tuple[int, int]]
    slot: int
    size_bytes: int
    is_new: bool
    gone: list[int]


class Outbox:
    """The child's end."""

    def __init__(self, connection: Connection, parent_pid: int) -> None:
        self._connection = connection
        self._parent_pid = parent_pid
        self._slots: dict[int, tuple[int, mmap.mmap]] = {}
        self._free: list[int] = []
        self._number = 0

    def freed(self, slots: Sequence[int]) -> None:
        self._free += slots

    def send(self, value: Any, note: Any) -> None:
        """`note` goes with it. Raises what pickle raises for a value that cannot be sent."""
        buffers: list[pickle.PickleBuffer] = []
        to = io.BytesIO()
        _Pickler(to, protocol=5, buffer_callback=buffers.append).dump(value)
        views = [buffer.raw() for buffer in buffers]
        spans, end = list[tuple[int, int]](), 0
        for view in views:
            spans.append((end, len(view)))
            end += -(-len(view) // _ALIGN) * _ALIGN
        slot, is_new, gone = self._slot(end)
        fd, memory = self._slots[slot]
        into = np.frombuffer(memory, np.uint8)
        for (offset, size_bytes), view in zip(spans, views, strict=True):
            into[offset : offset + size_bytes] = np.frombuffer(view, np.uint8)
        self._connection.send((Parcel(to.getvalue(), spans, slot, len(memory), is_new, gone), note))
        if is_new:
            send_handle(self._connection, fd, self._parent_pid)

    def _slot(self, size_bytes: int) -> tuple[int, bool, list[int]]:
        """The smallest free one that is large enough; else a new one, and the smallest of many go."""
        fitting = [slot for slot in self._free if len(self._slots[slot][1]) >= size_bytes]
        if fitting:
            slot = min(fitting, key=lambda slot: len(self._slots[slot][1]))
            self._free.remove(slot)
            return slot, False, []
        gone = sorted(self._free, key=lambda slot: len(self._slots[slot][1]))[: len(self._free) - _KEPT + 1]
        for slot in gone:
            self._free.remove(slot)
            os.close(self._slots.pop(slot)[0])
        self._number += 1
        fd = os.memfd_create("forebay-batch", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(mmap.PAGESIZE, size_bytes + size_bytes // 8))
        self._slots[self._number] = fd, mmap.mmap(fd, 0)
        return self._number, True, gone


class Inbox:
    """The trainer's end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._slots: dict[int, mmap.mmap] = {}
        self._loans = Loans[int]()

    def take_freed(self) -> list[int]:
        """Slots that nobody looks at any more; to be told to the child."""
        return self._loans.take_back()

    def receive(self) -> tuple[Any, Any]:
        """A value and its note. Raises EOFError when the child is gone."""
        parcel, note = self._connection.recv()
        for slot in parcel.gone:
            self._slots.pop(slot, None)
        if parcel.is_new:
            fd = recv_handle(self._connection)
            try:
                self._slots[parcel.slot] = mmap.mmap(fd, parcel.size_bytes)
            finally:
                os.close(fd)
        lent: npt.NDArray[np.uint8] = np.ndarray(
            (parcel.size_bytes,), np.uint8, buffer=self._slots[parcel.slot]
        )
        self._loans.lend(lent, parcel.slot)
        view = lent.data
        buffers = [view[offset : offset + size_bytes] for offset, size_bytes in parcel.spans]
        return pickle.loads(parcel.pickled, buffers=buffers), note


class _Pickler(pickle.Pickler):
    """Memory of tensors goes beside the stream, as that of NumPy's arrays does (PEP 574)."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.is_quantized or value.requires_grad:
            return NotImplemented
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        rebuild: Callable[..., torch.Tensor] = _tensor
        return rebuild, (pickle.PickleBuffer(raw.data), value.dtype, tuple(value.shape))


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(raw):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)
