"""Arenas of a trainer, each with the save that occupies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from forebay.checkpointd.arena import DATA_OFFSET, Arena
from forebay.checkpointd.container import Container, Slot
from forebay.checkpointd.device import DeviceCopies, page_lock, unlock

if TYPE_CHECKING:
    from forebay.checkpointd.handover import SaveHandle


class Buffer:
    """An arena and the save that occupies it."""

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self.bytes: torch.Tensor | None = None
        self.busy: SaveHandle | None = None
        self._locked = False
        self._shape: tuple[tuple[Slot, ...], int] | None = None
        self._places: list[tuple[str, torch.Tensor]] = []

    def fits(self, size_bytes: int) -> bool:
        return self.arena is not None and self.arena.capacity_bytes >= size_bytes

    def fill(self, container: Container, tensors: Mapping[str, torch.Tensor]) -> DeviceCopies:
        """Views into the arena are kept for as long as the file has the same shape."""
        assert self.bytes is not None
        shape = (container.slots, len(container.header))
        if self._shape is None or self._shape[0] is not shape[0] or self._shape[1] != shape[1]:
            self._shape, self._places = shape, container.places(self.bytes)
        return container.fill(self.bytes, self._places, tensors)

    def fill_part(
        self, container: Container, tensors: Mapping[str, torch.Tensor], start: int, size_bytes: int
    ) -> None:
        """So much of the file, from `start` on."""
        assert self.bytes is not None
        container.fill_part(self.bytes[:size_bytes], start, tensors)

    def fit(self, size_bytes: int) -> Arena:
        if self.arena is None or not self.fits(size_bytes):
            self.close()
            self.arena = Arena(size_bytes)
            self.bytes = torch.frombuffer(self.arena.map, dtype=torch.uint8, offset=DATA_OFFSET)
            self._locked = page_lock(self.bytes)
        return self.arena

    def close(self) -> None:
        if self._locked and self.bytes is not None:
            unlock(self.bytes)
        if self.arena:
            self.arena.close()
        self.arena, self.bytes, self._locked = None, None, False
        self._shape, self._places = None, []


def fit_all(buffers: Sequence[Buffer], size_bytes: int) -> None:
    for buffer in buffers:
        buffer.fit(size_bytes)
