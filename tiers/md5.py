"""MD5 of many bodies at once, where the SIMD extension is built; by hashlib where it is not.

An S3 server vouches for an object by its MD5, and MD5 of one stream runs at some 0.7 GB/s: more work
than all the rest of a transfer. Bodies that arrive at about the same time are therefore digested
together, one per SIMD lane (tiers/_native.c), at several times that rate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

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


def _alone(body: Buffer) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def _together(bodies: list[memoryview]) -> list[str]:
    if md5_many is None or len(bodies) == 1:
        return [_alone(body) for body in bodies]
    return [digest.hex() for digest in md5_many(bodies)]
