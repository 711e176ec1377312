"""Token ids one after the other, cut into windows of one length: raw, NumPy's .npy, Megatron's .bin and .idx.

Formats: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html; the header and the
tables of Megatron's index as NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py writes them.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from forebay.core.errors import FormatError, InvalidRequest
from forebay.loaders.formats.format import Format, Index, NoSpans, ShardFile, missing

TOKENS = "tokens"
_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_HEAD = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16",
}  # fmt: skip


@dataclass(frozen=True)
class Tokens(Format):
    """`tokens`: windows of `length` + `extra` ids; each begins `length` behind the one before it.

    extra: ids of the next window that each has too: 1 for training on the next id.
    dtype: of the ids in .bin files; a .npy file says so itself.
    The last ids of a shard, too few for a window, are left out.
    """

    name: ClassVar[str] = "tokens"
    length: int = 2048
    extra: int = 1
    dtype: str = "uint16"

    def __post_init__(self) -> None:
        _check_window(self.length, self.extra)
        if np.dtype(self.dtype).kind not in "iu":
            raise InvalidRequest(f"token ids cannot be {self.dtype}", hint="uint16, uint32, int32, int64")

    @property
    def signature(self) -> str:
        return f"{self.name}:{self.length}:{self.extra}:{self.dtype}"

    def index(self, file: ShardFile) -> Index:
        return Index(len(self.open(file, b"", ())))

    def open(self, file: ShardFile, index: bytes, fields: Sequence[str]) -> Windows:
        ids = _npy(file) if ".npy" in file.base_name else _ids(file, np.dtype(self.dtype))
        return Windows(file, ids, self.length, self.extra)


@dataclass(frozen=True)
class Megatron(Format):
    """`tokens` of an indexed dataset, whose .bin and .idx lie beside each other.

    length, extra: windows over all documents of a shard, packed one behind the other, as in Tokens;
        without a length each sequence is a sample, as long as it is.
    """

    name: ClassVar[str] = "megatron"
    length: int | None = None
    extra: int = 1

    def __post_init__(self) -> None:
        if self.length is not None:
            _check_window(self.length, self.extra)

    @property
    def signature(self) -> str:
        return f"{self.name}:{self.length}:{self.extra}"

    def is_shard(self, key: str) -> bool:
        return key.endswith(".bin")

    def companion_of(self, key: str) -> str | None:
        return f"{key.removesuffix('.bin')}.idx"

    def index(self, file: ShardFile) -> Index:
        return Index(len(self.open(file, b"", ())))

    def open(self, file: ShardFile, index: bytes, fields: Sequence[str]) -> Windows | Sequences:
        dtype, sizes, offsets = _megatron_tables(file)
        if self.length is None:
            return Sequences(file, _ids(file, dtype), sizes, offsets // dtype.itemsize)
        return Windows(file, _ids(file, dtype), self.length, self.extra)


class Windows(NoSpans):
    def __init__(self, file: ShardFile, ids: npt.NDArray[Any], length: int, extra: int) -> None:
        self.file = file
        count = max(0, (len(ids) - extra) // length)
        width = length + extra
        self._windows = np.lib.stride_tricks.sliding_window_view(ids, width)[::length][:count] if count else (
            np.empty((0, width), ids.dtype)
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._windows)

    def key(self, sample: int) -> str:
        return self.file.numbered(sample)

    def value(self, sample: int, field: str) -> Any:
        return self.rows(field)[sample]

    def rows(self, field: str) -> npt.NDArray[Any]:
        _only_tokens(field, self.file)
        return self._windows


class Sequences(NoSpans):
    """Of lengths of their own."""

    def __init__(
        self, file: ShardFile, ids: npt.NDArray[Any], sizes: npt.NDArray[Any], starts: npt.NDArray[Any]
    ) -> None:
        self.file = file
        self._ids, self._sizes, self._starts = ids, sizes, starts

    def __len__(self) -> int:
        return len(self._sizes)

    def key(self, sample: int) -> str:
        return self.file.numbered(sample)

    def value(self, sample: int, field: str) -> npt.NDArray[Any]:
        _only_tokens(field, self.file)
        start = int(self._starts[sample])
        return self._ids[start : start + int(self._sizes[sample])]

    def rows(self, field: str) -> None:
        return None


def _check_window(length: int, extra: int) -> None:
    if length < 1 or extra < 0:
        raise InvalidRequest(f"a window of {length} ids and {extra} more", hint="length >= 1, extra >= 0")


def _only_tokens(field: str, file: ShardFile) -> None:
    if field != TOKENS:
        raise missing(field, "every one", file, [TOKENS])


def _ids(file: ShardFile, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if file.size_bytes % dtype.itemsize:
        raise FormatError(
            f"{file.name} has {file.size_bytes} bytes, which is no whole number of {dtype}",
            hint="check dtype=, or write the shard again",
        )
    return file.array.view(dtype.newbyteorder("<"))


def _npy(file: ShardFile) -> npt.NDArray[Any]:
    try:
        head = io.BytesIO(bytes(file.array[: 1 << 16]))
        version = np.lib.format.read_magic(head)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(head)
    except ValueError as err:
        raise FormatError(f"{file.name} is no .npy file: {err}") from err
    if dtype.kind not in "iu" or len(shape) != 1:
        raise FormatError(f"{file.name} holds {dtype} of shape {shape}", hint="one row of integers is read")
    start, end = head.tell(), head.tell() + int(shape[0]) * dtype.itemsize
    if end != file.size_bytes:
        raise FormatError(f"{file.name} should end at byte {end}, not {file.size_bytes}; write it again")
    # The header's length keeps the array aligned only where the file's writer saw to it.
    return file.array[start:end].view(dtype) if start % dtype.itemsize == 0 else np.frombuffer(
        bytes(file.array[start:end]), dtype
    )  # fmt: skip


def _megatron_tables(file: ShardFile) -> tuple[np.dtype[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(type of the ids, how many each sequence has, where it begins in bytes). Raises FormatError."""
    table = file.companion
    if table is None:
        raise FormatError(
            f"{file.name} has no .idx beside it", hint="it belongs to the dataset like the .bin"
        )
    data = bytes(table.array)
    magic, version, code, count, documents = (
        _MEGATRON_HEAD.unpack_from(data) if len(data) >= _MEGATRON_HEAD.size else (b"", 0, 0, 0, 0)
    )
    if magic != _MEGATRON_MAGIC or version != 1 or code not in _MEGATRON_TYPES:
        raise FormatError(f"{table.name} is no index of Megatron's, version 1")
    start = _MEGATRON_HEAD.size
    if len(data) < start + 12 * count + 8 * documents:
        raise FormatError(f"{table.name} is cut off: {count} sequences need more than {len(data)} bytes")
    dtype = np.dtype(_MEGATRON_TYPES[code])
    sizes = np.frombuffer(data, "<i4", count, start).astype(np.int64)
    offsets = np.frombuffer(data, "<i8", count, start + 4 * count)
    ends = offsets + sizes * dtype.itemsize
    if count and (sizes.min() < 0 or offsets.min() < 0 or ends.max() > file.size_bytes):
        raise FormatError(f"{table.name} points behind the end of {file.name} ({file.size_bytes} bytes)")
    return dtype, sizes, offsets
