"""xxh3-128 for our own records, MD5 where an ETag vouches for it.

xxh3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import errno
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
_PATIENCE_S = 5.0


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
    """Digests in order what arrives out of order: from memory when its turn is near, else from the file.

    `also` is fed every piece as well: an MD5 that many streams share (tiers.md5).
    """

    def __init__(self, fd: int, also: Callable[[memoryview], Awaitable[None]] | None = None) -> None:
        self.size_bytes = 0
        self._fd = fd
        self._also = also
        self._xxh3 = xxhash.xxh3_128()
        self._ends: dict[int, int] = {}
        self._patient: dict[int, anyio.Event] = {}
        self._busy = anyio.Lock()

    async def written(self, start: int, end: int, body: memoryview | None = None) -> None:
        """A range is in the file; `body`, when it is still in memory, waits for its turn, up to a time."""
        self._ends[start] = end
        if body is not None and start > self.size_bytes:
            await self._turn_of(start)
        async with self._busy:
            if body is not None and start == self.size_bytes:
                await self._add(body)
            while self.size_bytes in self._ends and self.size_bytes not in self._patient:
                await self._add_from_file(self._ends[self.size_bytes])
        if called := self._patient.get(self.size_bytes):
            called.set()

    async def _turn_of(self, start: int) -> None:
        """Not for ever: the range before it may stand in line for the memory that this one holds."""
        self._patient[start] = anyio.Event()
        try:
            with anyio.move_on_after(_PATIENCE_S):
                await self._patient[start].wait()
        finally:
            del self._patient[start]

    async def _add_from_file(self, end: int) -> None:
        while self.size_bytes < end:
            piece = await to_thread.run_sync(os.pread, self._fd, end - self.size_bytes, self.size_bytes)
            if not piece:
                raise OSError(errno.EIO, "the file became shorter while it was written")
            await self._add(memoryview(piece))

    async def _add(self, piece: memoryview) -> None:
        await to_thread.run_sync(self._xxh3.update, piece)
        if self._also:
            await self._also(piece)
        self.size_bytes += len(piece)

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


def digest_uncached(path: Path) -> str:
    """As `digest_fd`, from the disk where that can be: the page cache is neither trusted nor filled."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        digest = xxhash.xxh3_128()
        offset = 0
        # O_DIRECT reads into aligned memory, which an anonymous mapping is.
        with mmap.mmap(-1, _STEP_BYTES) as step, memoryview(step) as view:
            while got := os.preadv(fd, [view], offset):
                digest.update(view[:got])
                offset += got
                if got < _STEP_BYTES:
                    break
        return digest.hexdigest()
    finally:
        os.close(fd)


def digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return digest_fd(file.fileno())
