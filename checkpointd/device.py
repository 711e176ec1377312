"""Copies from a GPU into an arena: page-locked memory, a stream of their own.

Untested on a GPU; on a CPU everything here does nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

log = logging.getLogger("forebay.checkpointd")


def page_lock(memory: torch.Tensor) -> bool:
    """Let a GPU copy into it without a bounce (cudaHostRegister). False without a GPU, or without luck."""
    if not torch.cuda.is_available():
        return False
    code = _runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code):
        log.warning("the arena is not page-locked (cudaHostRegister: %s): copies take longer", code)
    return not int(code)


def unlock(memory: torch.Tensor) -> None:
    _runtime().cudaHostUnregister(memory.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class DeviceCopies:
    """Starts copies on a side stream per device; `finish` waits for all of them."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """At once for memory of the host; started, for memory of a device, behind what computes it."""
        if not source.is_cuda:
            target.copy_(source)
            return
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(stream)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
