"""TFRecord: length-delimited records with masked CRC-32C, mostly tf.train.Example messages.

Formats: https://www.tensorflow.org/tutorials/load_data/tfrecord (framing) and
tensorflow/core/example/{example,feature}.proto. Both CRCs of every record are checked when the shard
is indexed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from forebay.core.errors import FormatError, TruncatedShard
from forebay.loaders.extras import need
from forebay.loaders.formats.format import Format, Index, ShardFile
from forebay.loaders.formats.spans import IndexBuilder, ShardIndex, Spans
from forebay.loaders.formats.wire import WireError, floats, int64s, wire_fields

RECORD = "record"
_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
# Behind the name of a field whose span is a whole Feature message, and not plain bytes.
_MESSAGE = "\0"


@dataclass(frozen=True)
class TFRecord(Format):
    """Fields are the features of each Example: bytes, a list of bytes, or arrays of float32 or int64.

    `record` is the whole record as bytes, which need not be an Example.
    """

    name: ClassVar[str] = "tfrecord"

    def index(self, file: ShardFile) -> Index:
        builder = IndexBuilder()
        for offset, size_bytes in _records(file):
            builder.begin_sample(file.numbered(len(builder.keys)))
            builder.add(RECORD, offset, size_bytes)
            for name, start, end in _features(file.view[offset : offset + size_bytes]):
                builder.add(name, offset + start, end - start)
        return builder.index()

    def open(self, file: ShardFile, index: bytes, fields: Sequence[str]) -> Spans:
        return _Examples(file, ShardIndex.decode(index))


class _Examples(Spans):
    def value(self, sample: int, field: str) -> Any:
        plain = self.find(sample, field)
        if plain is None and (whole := self.find(sample, _messages(field))):
            return _feature(self.file.view[whole[0] : sum(whole)])
        return super().value(sample, field)

    def fields_of(self, sample: int) -> list[str]:
        return [name.rstrip(_MESSAGE) for name in super().fields_of(sample)]


def _messages(field: str) -> str:
    return ";".join(f"{name}{_MESSAGE}" for name in field.split(";"))


def _records(file: ShardFile) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of each. Raises TruncatedShard, FormatError."""
    crc32c: Callable[[Any], int] = need("crc32c", "formats").crc32c
    data, at = file.view, 0
    while at < len(data):
        if len(data) - at < _HEAD.size:
            raise _cut_off(file, at)
        length, length_crc = _HEAD.unpack_from(data, at)
        if _masked(crc32c(data[at : at + 8])) != length_crc:
            raise FormatError(f"{file.name} has no record at byte {at}: the CRC of its length is wrong")
        start = at + _HEAD.size
        if len(data) - start < length + _FOOT.size:
            raise _cut_off(file, at)
        if _masked(crc32c(data[start : start + length])) != _FOOT.unpack_from(data, start + length)[0]:
            raise FormatError(f"{file.name}: the record at byte {at} is damaged: its CRC is wrong")
        yield start, length
        at = start + length + _FOOT.size


def _masked(crc: int) -> int:
    """Rotated and shifted, so that a CRC over data with CRCs in it is still a good one."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _cut_off(file: ShardFile, at: int) -> TruncatedShard:
    return TruncatedShard(
        f"{file.name} is cut off in the record at byte {at} ({file.size_bytes} bytes)",
        hint="write or upload the shard again",
    )


def _features(record: memoryview) -> list[tuple[str, int, int]]:
    """(name, start, end) in the record; none when this is no Example."""
    found = []
    try:
        for features in wire_fields(record):
            for entry in wire_fields(record[features.start : features.end]):
                at = features.start + entry.start
                name, start, end = _entry(record[at : features.start + entry.end])
                found.append((name, at + start, at + end))
    except (WireError, UnicodeDecodeError):
        return []
    return found


def _entry(message: memoryview) -> tuple[str, int, int]:
    """Of the map from names to features: (name, start, end), the bytes themselves if it is one value."""
    parts = {field.number: field for field in wire_fields(message)}
    if parts.keys() != {1, 2}:
        raise WireError("no entry of a map")
    name = bytes(message[parts[1].start : parts[1].end]).decode()
    start, end = parts[2].start, parts[2].end
    kinds = list(wire_fields(message[start:end]))
    if len(kinds) == 1 and kinds[0].number == _BYTES_LIST:
        low, high = start + kinds[0].start, start + kinds[0].end
        values = list(wire_fields(message[low:high]))
        if len(values) == 1:
            return name, low + values[0].start, low + values[0].end
    return f"{name}{_MESSAGE}", start, end


def _feature(message: memoryview) -> Any:
    """A Feature is one of three lists."""
    for kind in wire_fields(message):
        values = message[kind.start : kind.end]
        if kind.number == _BYTES_LIST:
            return [bytes(values[field.start : field.end]) for field in wire_fields(values)]
        if kind.number == _FLOAT_LIST:
            return floats(values)
        if kind.number == _INT64_LIST:
            return int64s(values)
    return np.empty(0, np.float32)
