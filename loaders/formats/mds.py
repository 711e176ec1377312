"""MDS, the shards of MosaicML Streaming, as they are: each says itself what its columns are.

Format: the files that mosaicml/streaming's MDSWriter writes: the number of samples, where each begins
(both uint32), a JSON object that describes the columns, the samples. A sample is the sizes of its
columns of no fixed size (uint32), then its columns in their order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from forebay.core.errors import FormatError, TruncatedShard
from forebay.loaders.formats.format import Format, Index, NoRows, ShardFile, missing

Ints = npt.NDArray[np.int64]
_SCALARS = (
    "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
)  # fmt: skip
# The codes by which an array tells the type of its values, and that of its shape.
_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_SHAPE_TYPES = ("uint8", "uint16", "uint32", "uint64")
_AS_BYTES = ("bytes", "jpeg", "png")


@dataclass(frozen=True)
class MDS(Format):
    """Fields are columns. Images (`jpeg`, `png`) are bytes until they are decoded; `pkl` is not read.

    The dataset's index.json is not needed.
    """

    name: ClassVar[str] = "mds"

    def index(self, file: ShardFile) -> Index:
        return Index(len(self.open(file, b"", ())))

    def open(self, file: ShardFile, index: bytes, fields: Sequence[str]) -> _Shard:
        data = file.array
        count = int(data[:4].view("<u4")[0]) if len(data) >= 8 else -1
        table_end = 4 + 4 * (count + 1)
        if count < 0 or table_end > len(data):
            raise TruncatedShard(f"{file.name} is no MDS shard, or cut off ({file.size_bytes} bytes)")
        offsets = data[4:table_end].view("<u4").astype(np.int64)
        if np.any(np.diff(offsets) < 0) or offsets[0] < table_end or offsets[-1] != file.size_bytes:
            raise TruncatedShard(
                f"{file.name} should end at byte {offsets[-1]}, not {file.size_bytes}",
                hint="the shard was cut off when it was written or uploaded; write it again",
            )
        try:
            said = json.loads(bytes(data[table_end : offsets[0]]))
            columns = [
                _Column(*column)
                for column in zip(
                    said["column_names"], said["column_encodings"], said["column_sizes"], strict=True
                )
            ]
        except (ValueError, KeyError, TypeError) as err:
            raise FormatError(f"{file.name} does not say what its columns are: {err!r}") from err
        return _Shard(file, offsets, columns)


@dataclass(frozen=True)
class _Column:
    name: str
    encoding: str
    size_bytes: int | None


class _Shard(NoRows):
    def __init__(self, file: ShardFile, offsets: Ints, columns: list[_Column]) -> None:
        self.file = file
        self._offsets = offsets
        self._columns = columns
        self._numbers = {column.name: number for number, column in enumerate(columns)}
        self._known: dict[int, tuple[list[int], list[int]]] = {}
        self._variable = [number for number, column in enumerate(columns) if column.size_bytes is None]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def key(self, sample: int) -> str:
        return self.file.numbered(sample)

    def value(self, sample: int, field: str) -> Any:
        number = self._number(field)
        starts, sizes = self._places(number)
        data = bytes(self.file.array[starts[sample] : starts[sample] + sizes[sample]])
        return _decoder(self._columns[number].encoding, self.file)(data)

    def spans(self, field: str) -> tuple[list[int], list[int]] | None:
        number = self._number(field)
        is_bytes = self._columns[number].encoding.partition(":")[0] in _AS_BYTES
        return self._places(number) if is_bytes else None

    def _number(self, field: str) -> int:
        for name in field.split(";"):
            if name in self._numbers:
                return self._numbers[name]
        raise missing(field, "every one", self.file, list(self._numbers))

    def _places(self, number: int) -> tuple[list[int], list[int]]:
        """(offsets, sizes) of a column in every sample."""
        if number not in self._known:
            sizes = self._sizes
            starts = self._offsets[:-1] + 4 * len(self._variable) + sizes[:, :number].sum(axis=1)
            self._known[number] = starts.tolist(), sizes[:, number].tolist()
        return self._known[number]

    @cached_property
    def _sizes(self) -> Ints:
        """(samples, columns): those that vary stand at the head of each sample. Raises FormatError."""
        starts, lengths = self._offsets[:-1], np.diff(self._offsets)
        head_bytes = 4 * len(self._variable)
        if (short := np.flatnonzero(lengths < head_bytes)).size:
            raise FormatError(f"{self.file.name}: sample {short[0]} is too short for its columns")
        sizes = np.array([column.size_bytes or 0 for column in self._columns], np.int64)
        sizes = np.broadcast_to(sizes, (len(self), len(sizes))).copy()
        if head_bytes:
            heads = self.file.array[starts[:, None] + np.arange(head_bytes)]
            sizes[:, self._variable] = heads.view("<u4")
        if (wrong := np.flatnonzero(head_bytes + sizes.sum(axis=1) != lengths)).size:
            raise FormatError(f"{self.file.name}: the columns of sample {wrong[0]} do not fill it")
        return sizes


def _decoder(encoding: str, file: ShardFile) -> Callable[[bytes], Any]:
    kind, _, options = encoding.partition(":")
    if kind in _AS_BYTES:
        return bytes
    if kind == "ndarray":
        dtype, _, shape = options.partition(":")
        return partial(_ndarray, dtype, shape)
    if kind == "int":
        return lambda data: int.from_bytes(data, "little", signed=True)
    if kind in _SCALARS:
        return lambda data: np.frombuffer(data, kind)[0].item()
    plain: dict[str, Callable[[bytes], Any]] = {
        "str": bytes.decode,
        "json": json.loads,
        "str_int": int,
        "str_float": float,
        "str_decimal": lambda data: Decimal(data.decode()),
        "pil": _pil,
    }
    if kind not in plain:
        why = "runs code when it is read" if kind == "pkl" else "is not known"
        raise FormatError(
            f"{file.name}: a column's encoding {encoding!r} {why}", hint="write it as another one"
        )
    return plain[kind]


def _ndarray(dtype: str, shape: str, data: bytes) -> npt.NDArray[Any]:
    """Type and shape are the column's, or come before the values of each array."""
    at = 0
    if not dtype:
        dtype, at = _TYPES[data[0]], 1
    if shape:
        dimensions = [int(length) for length in shape.split(",")]
    else:
        count, width = data[at] >> 2, _SHAPE_TYPES[data[at] & 3]
        dimensions = np.frombuffer(data, width, count, at + 1).tolist()
        at += 1 + count * np.dtype(width).itemsize
    return np.frombuffer(data, dtype, math.prod(dimensions), at).reshape(dimensions)


def _pil(data: bytes) -> Any:
    from PIL import Image

    width, height, mode_bytes = np.frombuffer(data, "<u4", 3).tolist()
    return Image.frombytes(data[12 : 12 + mode_bytes].decode(), (width, height), data[12 + mode_bytes :])
