"""Protocol buffers, as far as tf.train.Example needs them: fields of a message by number and place.

Format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


class WireError(ValueError):
    """This is no such message."""


class WireField(NamedTuple):
    """Its content is [start, end) of the message; of a varint that is the number's own bytes."""

    number: int
    kind: int
    start: int
    end: int


def wire_fields(message: memoryview) -> Iterator[WireField]:
    """In the order in which they come. Raises WireError."""
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        number, kind = tag >> 3, tag & 7
        start = at
        if kind == _BYTES:
            length, start = varint(message, at)
            at = start + length
        elif kind == _VARINT:
            _, at = varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
        else:
            raise WireError(f"wire type {kind} at byte {start}")
        if at > len(message) or not number:
            raise WireError(f"field {number} ends at byte {at} of {len(message)}")
        yield WireField(number, kind, start, at)


def varint(message: memoryview, at: int) -> tuple[int, int]:
    """(value, where it ends). Raises WireError."""
    value = 0
    for place in range(_LONGEST_VARINT):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at
    raise WireError(f"no number ends at byte {at}")


def floats(message: memoryview) -> npt.NDArray[np.float32]:
    """A message whose field 1 is `repeated float`, packed or not."""
    parts = [np.frombuffer(message[f.start : f.end], "<f4") for f in wire_fields(message)]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def int64s(message: memoryview) -> npt.NDArray[np.int64]:
    """A message whose field 1 is `repeated int64`, packed or not."""
    parts = [_varints(message[f.start : f.end]) for f in wire_fields(message)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _varints(packed: memoryview) -> npt.NDArray[np.int64]:
    """All at once: a number's bytes are added up, seven bits each, the lowest first."""
    data = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if not len(data):
        return np.empty(0, np.int64)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise WireError("a number is cut off")
    starts = np.concatenate([[0], ends[:-1] + 1])
    places = np.arange(len(data)) - np.repeat(starts, ends - starts + 1)
    if places.max() >= _LONGEST_VARINT:
        raise WireError("a number is too long")
    bits = (data & np.uint8(0x7F)).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(bits, starts).astype(np.uint64).view(np.int64)
