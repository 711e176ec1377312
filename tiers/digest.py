"""xxh3-128 for our own records, MD5 where an ETag vouches for it.

xxh3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import anyio
import xxhash
from anyio import to_thread

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
_STEP_BYTES = 4 << 20


class StreamDigest:
    """xxh3-128 of a stream, fed in order."""

    def __init__(self) -> None:
        self._xxh3 = xxhash.xxh3_128()
        self.size_bytes = 0

    def update(self, data: Buffer) -> None:
        self._xxh3.update(data)
        self.size_bytes += len(data)

    @property
    def xxh3(self) -> str:
        return self._xxh3.hexdigest()


class PrefixDigest:
    """Digests in order what arrives out of order, from the page cache, behind the writers.

    `also` is fed every piece as well: an MD5 that many streams share (tiers.md5).
    """

    def __init__(self, fd: int, also: Callable[[memoryview], Awaitable[None]] | None = None) -> None:
        self.size_bytes = 0
        self._fd = fd
        self._also = also
        self._xxh3 = xxhash.xxh3_128()
        self._ends: dict[int, int] = {}
        self._busy = anyio.Lock()

    async def arrived(self, start: int, end: int) -> None:
        self._ends[start] = end
        async with self._busy:
            while (end_of_next := self._ends.pop(self.size_bytes, None)) is not None:
                await self._hash_up_to(end_of_next)

    async def _hash_up_to(self, end: int) -> None:
        while self.size_bytes < end:
            piece = await to_thread.run_sync(self._read, min(end - self.size_bytes, _STEP_BYTES))
            if self._also:
                await self._also(piece)
            self.size_bytes += len(piece)

    def _read(self, want: int) -> memoryview:
        piece = os.pread(self._fd, want, self.size_bytes)
        if not piece:
            raise OSError(errno.EIO, "the file became shorter while it was written")
        self._xxh3.update(piece)
        return memoryview(piece)

    def hexdigest(self) -> str:
        return self._xxh3.hexdigest()


def digest_bytes(data: Buffer) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def digest_fd(fd: int) -> str:
    """xxh3-128 of a whole file; its offset is left alone. A file that shrinks raises no SIGBUS."""
    digest = xxhash.xxh3_128()
    offset = 0
    while chunk := os.pread(fd, _STEP_BYTES, offset):
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()


def digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return digest_fd(file.fileno())


def multipart_etag(path: Path, part_bytes: int) -> str:
    """What S3 answers for a multipart upload: the MD5 of the parts' MD5s, then their number."""
    digests = []
    with path.open("rb") as file:
        while part := file.read(part_bytes):
            digests.append(hashlib.md5(part, usedforsecurity=False).digest())
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def md5_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
