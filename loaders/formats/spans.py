"""Samples that are slices of their shard: the index says where each field of each sample lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.loaders.formats.format import Index, NoRows, ShardFile, missing

Ints = npt.NDArray[np.int64]


class _Payload(msgspec.Struct, array_like=True):
    """What goes over the wire and beside the shard (MessagePack; integers little endian)."""

    keys: list[str]
    fields: list[str]
    starts: bytes
    field_numbers: bytes
    offsets: bytes
    sizes: bytes


@dataclass(frozen=True)
class ShardIndex:
    """Columns over the members of a shard, in order.

    Sample i owns members starts[i] to starts[i + 1]; member m is field fields[field_numbers[m]] and
    lies at offsets[m], sizes[m] bytes long.
    """

    keys: list[str]
    fields: list[str]
    starts: Ints
    field_numbers: Ints
    offsets: Ints
    sizes: Ints
    _columns: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    def column(self, field: str) -> tuple[list[int], list[int]]:
        """(offsets, sizes) of a field in every sample, -1 where it is missing; worked out once.

        `field` may give alternatives, as in `jpg;png`: the first that a sample has.
        """
        if field not in self._columns:
            self._columns[field] = self._find(field.split(";"))
        return self._columns[field]

    def _find(self, names: list[str]) -> tuple[list[int], list[int]]:
        offsets = np.full(len(self), -1, dtype=np.int64)
        sizes = np.full(len(self), -1, dtype=np.int64)
        for name in reversed([name for name in names if name in self.fields]):
            members = np.flatnonzero(self.field_numbers == self.fields.index(name))
            samples = np.searchsorted(self.starts, members, side="right") - 1
            offsets[samples], sizes[samples] = self.offsets[members], self.sizes[members]
        return offsets.tolist(), sizes.tolist()

    def fields_of(self, sample: int) -> list[str]:
        members = self.field_numbers[self.starts[sample] : self.starts[sample + 1]]
        return [self.fields[number] for number in members.tolist()]

    def encode(self) -> bytes:
        columns = (self.starts, self.field_numbers, self.offsets, self.sizes)
        return msgspec.msgpack.encode(
            _Payload(self.keys, self.fields, *(c.astype("<i8").tobytes() for c in columns))
        )

    @classmethod
    def decode(cls, data: bytes) -> ShardIndex:
        payload = msgspec.msgpack.decode(data, type=_Payload)
        columns: Any = (payload.starts, payload.field_numbers, payload.offsets, payload.sizes)
        starts, numbers, offsets, sizes = (np.frombuffer(c, dtype="<i8") for c in columns)
        return cls(payload.keys, payload.fields, starts, numbers, offsets, sizes)


class IndexBuilder:
    """Collects members in order; samples are runs of members with one key."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._numbers: dict[str, int] = {}
        self._starts: list[int] = []
        self._members: list[tuple[int, int, int]] = []

    def begin_sample(self, key: str) -> None:
        self.keys.append(key)
        self._starts.append(len(self._members))

    def add(self, field: str, offset: int, size_bytes: int) -> None:
        number = self._numbers.setdefault(field, len(self._numbers))
        self._members.append((number, offset, size_bytes))

    def offset_in_sample(self, field: str) -> int | None:
        """Where the current sample has that field already."""
        wanted = self._numbers.get(field, -1)
        members = self._members[self._starts[-1] :]
        return next((offset for number, offset, _ in members if number == wanted), None)

    def index(self) -> Index:
        return Index(len(self.keys), self.build().encode())

    def build(self) -> ShardIndex:
        members = np.array(self._members, dtype=np.int64).reshape(-1, 3)
        starts = np.array([*self._starts, len(self._members)], dtype=np.int64)
        return ShardIndex(self.keys, list(self._numbers), starts, members[:, 0], members[:, 1], members[:, 2])


class Spans(NoRows):
    """An opened shard whose fields are slices of it. `hint`: for a field that is missing."""

    def __init__(self, file: ShardFile, index: ShardIndex, hint: str = "") -> None:
        self.file = file
        self._index = index
        self._hint = hint

    def __len__(self) -> int:
        return len(self._index)

    def key(self, sample: int) -> str:
        return self._index.keys[sample]

    def value(self, sample: int, field: str) -> Any:
        found = self.find(sample, field)
        if found is None:
            raise missing(field, self.key(sample), self.file, self.fields_of(sample), self._hint)
        offset, size_bytes = found
        return self.file.data[offset : offset + size_bytes]

    def spans(self, field: str) -> tuple[list[int], list[int]]:
        return self._index.column(field)

    def find(self, sample: int, field: str) -> tuple[int, int] | None:
        offsets, sizes = self._index.column(field)
        return None if offsets[sample] < 0 else (offsets[sample], sizes[sample])

    def fields_of(self, sample: int) -> list[str]:
        return self._index.fields_of(sample)
