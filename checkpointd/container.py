"""A safetensors file laid out ahead, so that tensors are copied straight to their places in it.

Format: https://huggingface.co/docs/safetensors (header length u64, JSON header, bytes without
gaps). Written by hand because the library serialises into memory of its own; read with the library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from forebay.checkpointd.device import DeviceCopies
from forebay.core.errors import CheckpointCorrupt, UnsupportedValue

_ALIGN_BYTES = 64
_LARGE_BYTES, _LARGE_ALIGN_BYTES = 1 << 20, 4096
_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SKELETON = "forebay"


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes: its bytes are [start, end) behind the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Container:
    """`header` comes first; slots are counted from its end."""

    header: bytes
    slots: tuple[Slot, ...]
    size_bytes: int

    def places(self, into: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Where in `into` (uint8, at least size_bytes) each tensor goes; the empty ones go nowhere."""
        data = into[len(self.header) : self.size_bytes]
        views = {slot.dtype: _whole(data, slot.dtype) for slot in self.slots}
        found = []
        for slot in self.slots:
            if slot.start != slot.end:
                width = slot.dtype.itemsize
                place = views[slot.dtype][slot.start // width : slot.end // width]
                found.append((slot.name, place.view(slot.shape)))
        return found

    def fill(
        self,
        into: torch.Tensor,
        places: Sequence[tuple[str, torch.Tensor]],
        tensors: Mapping[str, torch.Tensor],
    ) -> DeviceCopies:
        """Copy everything into `into`, to its `places` there: the only copy of a save.

        What comes from a device is there when the copies that are returned have finished.

        torch copies large tensors with its own threads, without the GIL.
        """
        into[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        copies = DeviceCopies()
        for name, place in places:
            copies.copy(place, tensors[name])
        return copies

    def fill_part(self, into: torch.Tensor, start: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the file's bytes from `start` on, as many as `into` has; `start` is a multiple of 64."""
        end = start + len(into)
        header = self.header[start:end]
        if header:
            into[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        copies = DeviceCopies()
        for slot in self.slots:
            base = len(self.header) + slot.start
            low, high = max(base, start), min(base + slot.end - slot.start, end)
            if low < high:
                width = slot.dtype.itemsize
                source = tensors[slot.name].reshape(-1)[(low - base) // width : (high - base) // width]
                copies.copy(into[low - start : high - start].view(slot.dtype), source)
        copies.finish()


def _whole(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)


def lay_out(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Container:
    """Plan the file. Widest types first, so that every slot is aligned although there are no gaps."""
    plan = _plan(tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()))
    text = b'{"__metadata__":' + msgspec.json.encode({"format": "pt", **metadata}) + plan.entries + b"}"
    # In a large file a header that grows by some digits moves nothing behind it.
    align = _LARGE_ALIGN_BYTES if plan.size_bytes > _LARGE_BYTES else _ALIGN_BYTES
    text += b" " * (-(len(text) + 8) % align)
    header = len(text).to_bytes(8, "little") + text
    return Container(header, plan.slots, len(header) + plan.size_bytes)


@dataclass(frozen=True)
class _Plan:
    """What depends on names, types and shapes alone. `entries` is JSON, with a comma before each."""

    entries: bytes
    slots: tuple[Slot, ...]
    size_bytes: int


# A training run saves the same tensors again and again.
@lru_cache(maxsize=4)
def _plan(signature: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> _Plan:
    """Raises UnsupportedValue for a type that the format has not."""
    for name, dtype, _ in signature:
        if dtype not in _DTYPES:
            raise UnsupportedValue(f"tensor {name!r} has dtype {dtype}, which safetensors cannot hold")
    slots, offset = list[Slot](), 0
    for name, dtype, shape in sorted(signature, key=lambda item: -item[1].itemsize):
        end = offset + shape.numel() * dtype.itemsize
        slots.append(Slot(name, dtype, tuple(shape), offset, end))
        offset = end
    entries = [
        b"," + msgspec.json.encode(slot.name) + b":" + msgspec.json.encode(
            {"dtype": _DTYPES[slot.dtype], "shape": slot.shape, "data_offsets": (slot.start, slot.end)}
        )
        for slot in slots
    ]  # fmt: skip
    return _Plan(b"".join(entries), tuple(slots), offset)


def parse_header(head: bytes, size_bytes: int) -> tuple[list[Slot], dict[str, str]]:
    """Slots in order of the file, and its metadata; `head` is everything before the first slot.

    Raises ValueError, KeyError or TypeError unless the slots fill the file exactly.
    """
    entries = json.loads(head[8:])
    metadata = entries.pop("__metadata__", {})
    dtypes = {spelled: dtype for dtype, spelled in _DTYPES.items()}
    slots = []
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        slot = Slot(name, dtypes[entry["dtype"]], tuple(entry["shape"]), start, end)
        if min(slot.shape, default=0) < 0 or end - start != math.prod(slot.shape) * slot.dtype.itemsize:
            raise ValueError(f"{name} has {end - start} bytes for shape {slot.shape}")
        slots.append(slot)
    slots.sort(key=lambda slot: (slot.start, slot.end))
    at = 0
    for slot in slots:
        if slot.start != at:
            raise ValueError(f"{slot.name} begins at {slot.start}, not at {at}")
        at = slot.end
    if len(head) + at != size_bytes:
        raise ValueError(f"the tensors end at {len(head) + at}, the file at {size_bytes}")
    return slots, metadata


class OpenContainer:
    """A safetensors file by descriptor. Tensors are read on demand, each into memory of its own."""

    def __init__(self, fd: int, where: str) -> None:
        self._where = where
        self._file: Any
        try:
            self._file = safe_open(Path(f"/proc/self/fd/{fd}"), framework="pt")
        except (SafetensorError, OSError) as err:
            raise CheckpointCorrupt(f"{where} is not a safetensors file: {err}") from err
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.names: list[str] = list(self._file.keys())

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        spelled = self.slice(name).get_dtype()
        return next(dtype for dtype, name in _DTYPES.items() if name == spelled)

    def slice(self, name: str) -> Any:
        """safetensors' slice: `get_shape()`, `get_dtype()`, indexing reads that part alone."""
        return self._file.get_slice(name)

    def skeleton(self) -> Any:
        """The plain part of the state. Raises CheckpointCorrupt when Forebay did not write the file."""
        if SKELETON not in self.metadata:
            raise CheckpointCorrupt(
                f"{self._where} holds bare tensors, no state",
                hint="it was saved through torch.distributed.checkpoint: load it with ForebayReader",
            )
        return json.loads(self.metadata[SKELETON])
