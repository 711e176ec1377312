"""A part of a snapshot's tensor bytes: the same twice means that what is saved does not change (F35).

A digest of all bytes would not tell: a step number beside the tensors changes it. One more digest of all
tensors would cost the trainer's cores what every file costs already; so of each 256 KiB 4 KiB are taken,
and more where that would be little.
"""

from __future__ import annotations

from forebay.tiers.digest import StreamDigest

_TAKEN_BYTES = 4 << 10
_EVERY_BYTES = 256 << 10
# So many pieces are taken of small files too: up to 16 MiB that is all of it.
_PIECES = 4096
_LENGTH_BYTES = 8


class Sample:
    """Of one safetensors file, fed in order; the first part holds its first eight bytes."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._digest = StreamDigest()
        self._at = 0
        self._next = 0
        self._every_bytes = _EVERY_BYTES

    def update(self, part: memoryview) -> None:
        if not self._next:
            # The header's length comes first, and the tensors follow the header.
            self._next = _LENGTH_BYTES + int.from_bytes(part[:_LENGTH_BYTES], "little")
            even = (self._size_bytes - self._next) // _PIECES // _TAKEN_BYTES * _TAKEN_BYTES
            self._every_bytes = max(_TAKEN_BYTES, min(even, _EVERY_BYTES))
        end = self._at + len(part)
        while self._next < end:
            stop = self._next + _TAKEN_BYTES
            self._digest.update(part[max(0, self._next - self._at) : stop - self._at])
            if stop > end:
                # The rest of it comes with the next part.
                break
            self._next += self._every_bytes
        self._at = end

    @property
    def xxh3(self) -> str | None:
        """None when there were no tensor bytes at all."""
        return self._digest.xxh3 if self._digest.size_bytes else None
