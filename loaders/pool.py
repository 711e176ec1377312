"""Memory for batches, used again: the page faults of fresh memory cost as much as the copy into it."""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forebay.core.errors import InvalidRequest
from forebay.loaders.loans import Loans

_Block = npt.NDArray[np.uint8]
# Smaller ones come from the allocator's own free lists, without a fault.
_LEAST_BYTES = 64 << 10


class BatchPool:
    """Tensors whose memory comes back when the last view of them is gone.

    pin: page-locked, from torch's own pool, which waits for copies to the device that still read it;
        None for where this process has initialised CUDA. max_bytes: kept for later, at most.
    """

    def __init__(self, max_bytes: int, pin: bool | None = False) -> None:
        if pin and not torch.cuda.is_available():
            raise InvalidRequest("pin_memory is set, and there is no CUDA device", hint="leave it out")
        self._pin = cuda_runs() if pin is None else pin
        self._device = torch.cuda.current_device() if self._pin else None
        self._max_bytes = max_bytes
        self._kept_bytes = 0
        self._free: dict[int, deque[_Block]] = defaultdict(deque)
        self._loans = Loans[_Block]()
        self._lock = threading.Lock()

    def enter_thread(self) -> None:
        """In each thread that asks: page-locked memory belongs to the device of the pool's maker."""
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self._pin:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < _LEAST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        # torch keeps this very array; a view of it would keep the block alone.
        lent = self._lend(_rounded(size_bytes), size_bytes)
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    def stack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """As torch.stack, of tensors of one shape and type."""
        first = values[0]
        if first.device.type != "cpu" or any(value.requires_grad for value in values):
            return torch.stack(list(values))
        into = self.empty((len(values), *first.shape), first.dtype)
        return torch.stack(list(values), out=into)

    def _lend(self, block_bytes: int, size_bytes: int) -> npt.NDArray[Any]:
        with self._lock:
            self._collect()
            free = self._free[block_bytes]
            if free:
                self._kept_bytes -= block_bytes
            block = free.pop() if free else np.empty(block_bytes, np.uint8)
            lent: npt.NDArray[Any] = np.ndarray((size_bytes,), np.uint8, buffer=block.data)
            self._loans.lend(lent, block)
            return lent

    def _collect(self) -> None:
        for block in self._loans.take_back():
            if self._kept_bytes + block.nbytes <= self._max_bytes:
                self._kept_bytes += block.nbytes
                self._free[block.nbytes].append(block)


def cuda_runs() -> bool:
    """This process uses CUDA already; asking does not begin it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _rounded(size_bytes: int) -> int:
    """Up to an eighth more, so that batches of nearly one size share their blocks."""
    step = max(4096, 1 << (size_bytes.bit_length() - 4))
    return -(-size_bytes // step) * step
