"""What a format is: it finds the samples in a shard, and takes their fields out of it."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.core.errors import MissingField

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ShardFile:
    """A whole shard in memory: mapped, or unpacked. `companion` is the object that explains it, if any."""

    name: str
    data: Any
    size_bytes: int
    companion: ShardFile | None = None

    @cached_property
    def array(self) -> Bytes:
        if not self.size_bytes:
            return np.empty(0, np.uint8)
        return np.frombuffer(self.data, np.uint8, self.size_bytes)

    @property
    def view(self) -> memoryview:
        return self.array.data

    @property
    def base_name(self) -> str:
        return self.name.rpartition("/")[2]

    def numbered(self, sample: int) -> str:
        """The key of a sample that has no name of its own."""
        return f"{self.base_name}:{sample}"


class BinaryView(io.RawIOBase, BinaryIO):
    """A shard as a file object, for libraries that want one; nothing is copied before it is read."""

    def __init__(self, file: ShardFile) -> None:
        self._data = file.view
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Behind the end, too, as files allow it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


@dataclass(frozen=True)
class Index:
    """`payload` is the format's own; it is kept by stagerd for all ranks of the node."""

    samples: int
    payload: bytes = b""


class Samples(Protocol):
    """An opened shard."""

    def __len__(self) -> int: ...

    def key(self, sample: int) -> str:
        """A name for people: in errors, and as the field `__key__`."""
        ...

    def value(self, sample: int, field: str) -> Any:
        """Bytes, where the format holds bytes; else the value itself. Raises MissingField."""
        ...

    def rows(self, field: str) -> npt.NDArray[Any] | None:
        """All values of a field as rows of one array, if that is how they lie in memory."""
        ...

    def spans(self, field: str) -> tuple[list[int], list[int]] | None:
        """(offsets, sizes) of a field in every sample, where values are bytes that lie in the shard.

        -1 where a sample has not that field. Raises MissingField where none can have it.
        """
        ...


class Format(ABC):
    """Small, immutable and picklable: an instance is the configuration of one format.

    block_shards: how many shards are mixed by default; single: every shard is one sample.
    """

    name: ClassVar[str]
    block_shards: ClassVar[int] = 8
    single: ClassVar[bool] = False

    @property
    def signature(self) -> str:
        """Whatever the indices of this instance depend on. With another one, samples are other samples."""
        return self.name

    def is_shard(self, key: str) -> bool:
        """False for objects that belong to the dataset without holding samples."""
        return True

    def companion_of(self, key: str) -> str | None:
        """The key of an object that is needed to read this one."""
        return None

    @abstractmethod
    def index(self, file: ShardFile) -> Index:
        """Raises kinds of FormatError."""

    @abstractmethod
    def open(self, file: ShardFile, index: bytes, fields: Sequence[str]) -> Samples:
        """`fields` will be asked for. Raises kinds of FormatError."""


class NoRows:
    """For samples whose values do not lie in memory as rows of arrays."""

    def rows(self, field: str) -> npt.NDArray[Any] | None:
        return None


class NoSpans:
    """For samples whose values are not bytes of the shard."""

    def spans(self, field: str) -> tuple[list[int], list[int]] | None:
        return None


def missing(field: str, sample: str, file: ShardFile, there: Sequence[str], hint: str = "") -> MissingField:
    """The error for a field that a sample lacks; it lists what the sample does have."""
    return MissingField(
        f"sample {sample!r} in {file.name} has no field {field!r}; it has {', '.join(there)}", hint=hint
    )
