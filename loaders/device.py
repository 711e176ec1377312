"""The copy to the device goes on while the step before it computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree


class DevicePrefetcher:
    """Batches of a loader on `device`, one ahead: copied on a stream of its own from page-locked memory.

    On the CPU batches are handed through as they are. Tensors anywhere in a batch (tuples, lists, dicts)
    are moved, the rest stays. Save its `state_dict()`, not the loader's, which is a batch ahead.
    """

    def __init__(self, loader: Iterable[Any], device: str | torch.device) -> None:
        self.loader = loader
        self.device = torch.device(device)
        self._state: Any = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self.device.type == "cpu":
            yield from self.loader
            return
        stream = _stream(self.device)
        before, ahead = self.state_dict(), list[tuple[Any, Any]]()
        self._state = before
        for batch in self.loader:
            with torch.cuda.stream(stream) if stream else nullcontext():
                moved = pytree.tree_map_only(torch.Tensor, self._move, batch)
            if ahead:
                yield self._ready(*ahead.pop(), stream)
            ahead.append((moved, self._loader_state()))
        for moved, state in ahead:
            yield self._ready(moved, state, stream)
        # The pass is over: so is the loader's, which is at the start of the next one.
        self._state = None

    def state_dict(self) -> Any:
        """The loader's behind the batch yielded last. None when it keeps no state."""
        return self._loader_state() if self._state is None else self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = None
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]

    def _loader_state(self) -> Any:
        return self.loader.state_dict() if hasattr(self.loader, "state_dict") else None

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _ready(self, batch: Any, state: Any, stream: torch.cuda.Stream | None) -> Any:
        """The computing stream waits for the copy, and the allocator knows who uses its memory."""
        self._state = state
        if stream:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(stream)
            pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.record_stream(current), batch)
        return batch


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
