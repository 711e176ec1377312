"""MD5 of many bodies at once, where the SIMD extension is built; by hashlib where it is not.

An S3 server vouches for an object by its MD5, and MD5 of one stream runs at some 0.7 GB/s: more work
than all the rest of a transfer. Bodies that arrive at about the same time are therefore digested
together, one per SIMD lane (tiers/_md5lanes.c), at several times that rate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
from anyio import to_thread

from forebay.tiers.digest import Buffer

try:
    from forebay.tiers._md5lanes import md5_many
except ImportError:
    md5_many = None

# A batch costs the same for one lane as for all: below this size waiting for others does not pay.
LARGE_BYTES = 256 << 10
_LANES = 16
# How long a body waits for company when others are still on their way.
_LINGER_S = 0.1


@dataclass(eq=False)
class _Job:
    body: memoryview
    md5: str = ""
    done: anyio.Event = field(default_factory=anyio.Event)


class Md5Lanes:
    """Shared by all transfers of a daemon; all methods run on its event loop."""

    def __init__(self) -> None:
        self._waiting: list[_Job] = []
        self._coming = 0

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


def _alone(body: Buffer) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def _together(bodies: list[memoryview]) -> list[str]:
    assert md5_many is not None
    return [digest.hex() for digest in md5_many(bodies)]
