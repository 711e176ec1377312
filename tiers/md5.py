"""MD5 of many bodies at once, where the SIMD extension is built; by hashlib where it is not.

An S3 server vouches for an object by its MD5, and MD5 of one stream runs at some 0.7 GB/s: more work
than all the rest of a transfer. Bodies that arrive at about the same time are therefore digested
together, one per SIMD lane (tiers/_native.c), at several times that rate.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio import to_thread

from forebay.tiers.digest import Buffer

try:
    from forebay.tiers._native import md5_extend, md5_finish, md5_many
except ImportError:
    md5_many = None

# A batch costs the same for one lane as for all: below this size waiting for others does not pay.
LARGE_BYTES = 256 << 10
_LANES = 16
_BLOCK_BYTES = 64
_STEP_BYTES = 1 << 20
# RFC 1321, 3.3.
_START = bytes.fromhex("0123456789abcdeffedcba9876543210")
# How long a body waits for company when others are still on their way.
_LINGER_S = 0.1


@dataclass(eq=False)
class _Job:
    body: memoryview
    md5: str = ""
    done: anyio.Event = field(default_factory=anyio.Event)


@dataclass(eq=False)
class _Extension:
    state: bytearray
    body: memoryview


class Md5Stream:
    """MD5 of one object in pieces."""

    def __init__(self, lanes: Md5Lanes) -> None:
        self._lanes = lanes
        self._hash = hashlib.md5(usedforsecurity=False) if md5_many is None else None
        self._state = bytearray(_START)
        self._tail = b""
        self._total = 0

    async def update(self, body: memoryview) -> None:
        self._total += len(body)
        if self._hash:
            await to_thread.run_sync(self._hash.update, body)
            return
        if self._tail:
            body = memoryview(self._tail + bytes(body))
        whole = len(body) - len(body) % _BLOCK_BYTES
        self._tail = bytes(body[whole:])
        if whole:
            await self._lanes.extend(self._state, body[:whole])

    def hexdigest(self) -> str:
        if self._hash:
            return self._hash.hexdigest()
        return str(md5_finish(self._state, self._tail, self._total).hex())


class Md5Lanes:
    """Shared by all transfers of a daemon; all methods run on its event loop."""

    def __init__(self) -> None:
        self._waiting: list[_Job] = []
        self._coming = 0
        self._streams = 0
        self._extending: list[_Extension] = []
        self._full = anyio.Event()
        self._batch = anyio.Lock()

    async def of(
        self, read: Callable[[], Awaitable[memoryview]], *, alone: bool = False
    ) -> tuple[memoryview, str]:
        """What `read` returns, and its MD5 in hex; `alone` waits for no company.

        Raises what `read` raises."""
        if alone:
            body = await read()
            return body, await to_thread.run_sync(_alone, body)
        self._coming += 1
        try:
            body = await read()
        finally:
            self._coming -= 1
            if not self._coming:
                await self._digest_waiting()
        if md5_many is None or len(body) < LARGE_BYTES:
            return body, await to_thread.run_sync(_alone, body)
        job = _Job(body)
        self._waiting.append(job)
        if self._coming and len(self._waiting) < _LANES:
            with anyio.move_on_after(_LINGER_S):
                await job.done.wait()
        if job in self._waiting:
            await self._digest_waiting()
        await job.done.wait()
        return body, job.md5

    @contextmanager
    def stream(self) -> Iterator[Md5Stream]:
        """One large object, fed in order; streams that are open together are digested together."""
        found = Md5Stream(self)
        self._streams += 1
        try:
            yield found
        finally:
            self._streams -= 1
            if len(self._extending) >= self._streams:
                self._full.set()

    async def extend(self, state: bytearray, body: memoryview) -> None:
        """Whole blocks of one stream, when those of the other streams are there too, or soon."""
        job = _Extension(state, body)
        self._extending.append(job)
        if len(self._extending) < min(self._streams, _LANES):
            full = self._full
            with anyio.move_on_after(_LINGER_S):
                await full.wait()
        with anyio.CancelScope(shield=True):
            # One batch at a time: who comes meanwhile makes the next one fuller.
            async with self._batch:
                if job in self._extending:
                    await self._extend_waiting()

    async def _extend_waiting(self) -> None:
        batch, self._extending = self._extending[:_LANES], self._extending[_LANES:]
        self._full.set()
        self._full = anyio.Event()
        await to_thread.run_sync(
            md5_extend, [other.state for other in batch], [other.body for other in batch]
        )

    async def _digest_waiting(self) -> None:
        """Bounded work on behalf of others too: a cancelled caller still finishes it."""
        batch, self._waiting = self._waiting[:_LANES], self._waiting[_LANES:]
        if not batch:
            return
        with anyio.CancelScope(shield=True):
            digests = await to_thread.run_sync(_together, [job.body for job in batch])
            for job, md5 in zip(batch, digests, strict=True):
                job.md5 = md5
                job.done.set()


def md5_of(bodies: list[memoryview]) -> list[str]:
    """Of any number of bodies; those of like size share the lanes."""
    batches = (bodies[start : start + _LANES] for start in range(0, len(bodies), _LANES))
    return [digest for batch in batches for digest in _together(batch)]


def object_etag(path: Path, part_bytes: int) -> str:
    """What S3 answers for a file put whole, or in parts of that size: an MD5, or that of the parts' MD5s."""
    size_bytes = path.stat().st_size
    if size_bytes <= part_bytes:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    digests = part_md5s(path, part_bytes)
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def part_md5s(path: Path, part_bytes: int) -> list[bytes]:
    """Of each part of that size; the last may be shorter."""
    with path.open("rb", buffering=0) as file:
        starts = range(0, os.fstat(file.fileno()).st_size, part_bytes)
        return [
            digest
            for first in range(0, len(starts), _LANES)
            for digest in _of_parts(file.fileno(), starts[first : first + _LANES], part_bytes)
        ]


def _of_parts(fd: int, starts: Sequence[int], part_bytes: int) -> list[bytes]:
    """MD5s of some parts of a file side by side, a step of each at a time."""
    if md5_many is None:
        return [_of_part(fd, start, part_bytes) for start in starts]
    states = [bytearray(_START) for _ in starts]
    totals, tails = [0] * len(starts), [b""] * len(starts)
    for step in range(0, part_bytes, _STEP_BYTES):
        want = min(_STEP_BYTES, part_bytes - step)
        pieces = [os.pread(fd, want, start + step) for start in starts]
        wholes = [memoryview(piece)[: len(piece) - len(piece) % _BLOCK_BYTES] for piece in pieces]
        md5_extend(states, wholes)
        for number, (piece, whole) in enumerate(zip(pieces, wholes, strict=True)):
            totals[number] += len(piece)
            tails[number] += piece[len(whole) :]
    return [md5_finish(state, tail, total) for state, tail, total in zip(states, tails, totals, strict=True)]


def _of_part(fd: int, start: int, part_bytes: int) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    for step in range(0, part_bytes, _STEP_BYTES):
        digest.update(os.pread(fd, min(_STEP_BYTES, part_bytes - step), start + step))
    return digest.digest()


def _alone(body: Buffer) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def _together(bodies: list[memoryview]) -> list[str]:
    if md5_many is None or len(bodies) == 1:
        return [_alone(body) for body in bodies]
    return [digest.hex() for digest in md5_many(bodies)]
