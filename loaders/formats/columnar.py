"""Parquet and Arrow IPC files: each row is a sample, only the columns that are wanted are read.

Formats: https://parquet.apache.org/docs/file-format/,
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.core.errors import FormatError
from forebay.loaders.formats.format import Format, Index, NoSpans, ShardFile, missing


class _Columnar(Format):
    def open(self, file: ShardFile, index: bytes, fields: Sequence[str]) -> Rows:
        with _named(file):
            return Rows(file, self._table(file, fields))

    @abstractmethod
    def _table(self, file: ShardFile, fields: Sequence[str]) -> pa.Table: ...


@dataclass(frozen=True)
class Parquet(_Columnar):
    """Fields are columns; `a.b` is the field b of a struct column a.

    A shard's columns are decoded when it is opened, and stay in memory as long as it is in use.
    """

    name: ClassVar[str] = "parquet"

    def index(self, file: ShardFile) -> Index:
        with _named(file):
            return Index(pq.read_metadata(_reader(file)).num_rows)

    def _table(self, file: ShardFile, fields: Sequence[str]) -> pa.Table:
        opened = pq.ParquetFile(_reader(file))
        roots = {name.partition(".")[0] for name in opened.schema_arrow.names}
        wanted = [field for field in fields if field.partition(".")[0] in roots]
        return opened.read(columns=wanted)


@dataclass(frozen=True)
class Arrow(_Columnar):
    """IPC files and streams (as HuggingFace datasets keeps them), read where they are mapped."""

    name: ClassVar[str] = "arrow"

    def index(self, file: ShardFile) -> Index:
        with _named(file):
            return Index(self._table(file, ()).num_rows)

    def _table(self, file: ShardFile, fields: Sequence[str]) -> pa.Table:
        is_file = bytes(file.array[:6]) == b"ARROW1"
        return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(_reader(file)).read_all()


class Rows(NoSpans):
    """An opened table."""

    def __init__(self, file: ShardFile, table: pa.Table) -> None:
        self.file = file
        self._table = table
        self._columns: dict[str, _Column] = {}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def key(self, sample: int) -> str:
        return self.file.numbered(sample)

    def value(self, sample: int, field: str) -> Any:
        return self._column(field)[sample]

    def rows(self, field: str) -> npt.NDArray[Any] | None:
        return self._column(field).array

    def _column(self, field: str) -> _Column:
        if field not in self._columns:
            self._columns[field] = _Column(self._find(field))
        return self._columns[field]

    def _find(self, field: str) -> pa.ChunkedArray:
        if field in self._table.column_names:
            return self._table[field]
        root, _, path = field.partition(".")
        try:
            return pc.struct_field(self._table[root], path.split("."))
        except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as err:
            raise missing(field, "every one", self.file, self._table.column_names) from err


class _Column:
    def __init__(self, values: pa.ChunkedArray) -> None:
        self._values = values
        kind = values.type
        self._lists = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_number(kind.value_type)

    def __getitem__(self, sample: int) -> Any:
        value = self._values[sample]
        if self._lists and value.is_valid:
            return value.values.to_numpy(zero_copy_only=False)
        return value.as_py()

    @cached_property
    def array(self) -> npt.NDArray[Any] | None:
        """(rows,) of numbers, or (rows, n) of lists of n numbers; None when some are null."""
        kind, values = self._values.type, self._values
        if values.null_count:
            return None
        if _is_number(kind):
            return np.asarray(values.to_numpy())
        if pa.types.is_fixed_size_list(kind) and _is_number(kind.value_type):
            flat = pa.chunked_array([chunk.flatten() for chunk in values.chunks], kind.value_type)
            if not flat.null_count:
                return np.asarray(flat.to_numpy()).reshape(len(values), kind.list_size)
        return None


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _reader(file: ShardFile) -> pa.BufferReader:
    return pa.BufferReader(pa.py_buffer(file.array))


@contextmanager
def _named(file: ShardFile) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as err:
        raise FormatError(f"{file.name} cannot be read ({file.size_bytes} bytes): {err}") from err
