"""Move one object from a store to a local file, verified.

The bytes go to a temporary name on the same file system, in one GET when the object is small and
in parallel ranges when it is large. Digests are taken while they arrive. Only when length and
digests fit is the file renamed to its final name; whatever else happens, the temporary is gone.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
import structlog
from anyio import to_thread
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from forebay.core.config import TransferSettings
from forebay.core.errors import (
    DigestMismatch,
    ForebayError,
    ShortBody,
    StoreBusy,
    StoreUnreachable,
    root_cause,
)
from forebay.tiers.budget import ByteBudget
from forebay.tiers.digest import StreamDigest
from forebay.tiers.filesystem import os_error, temporary_beside
from forebay.tiers.md5 import Md5Lanes
from forebay.tiers.store import ObjectInfo, Store

log = structlog.get_logger()
T = TypeVar("T")

_TRANSIENT = (StoreUnreachable, StoreBusy, ShortBody)
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0
_PARALLEL_RANGES = 8
_WRITE_BYTES = 64 << 10


@dataclass(frozen=True)
class Fetched:
    """A file that has just become visible. `blocks_bytes` is what the disk gave for it."""

    path: Path
    size_bytes: int
    blocks_bytes: int
    digest: str


async def retrying(call: Callable[[], Awaitable[T]], attempts: int) -> T:
    """Try again what may pass by itself, with full jitter (so that many waiters spread out)."""
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(_TRANSIENT),
        wait=wait_random_exponential(_FIRST_WAIT_S, _LONGEST_WAIT_S),
        stop=stop_after_attempt(attempts),
        before_sleep=_say,
        sleep=anyio.sleep,
        reraise=True,
    ):
        with attempt:
            return await call()
    raise AssertionError("tenacity either returns or raises")


def _say(state: RetryCallState) -> None:
    if state.outcome and state.next_action:
        wait_s = round(state.next_action.sleep, 2)
        log.warning("trying again", error=str(state.outcome.exception()), wait_s=wait_s)


class Transfers:
    """All transfers of a daemon: one policy, one budget of bytes in memory, one place for checksums."""

    def __init__(self, policy: TransferSettings) -> None:
        self._policy = policy
        self._budget = ByteBudget(policy.inflight_bytes)
        self._md5 = Md5Lanes()

    async def fetch(self, store: Store, info: ObjectInfo, final: Path) -> Fetched:
        """Bring `info` to `final`.

        Wrong bytes are fetched again, up to `attempts` times. Raises StoreError, ObjectChanged,
        DigestMismatch (with what was expected and what came), DiskFull.
        """
        for attempt in range(self._policy.attempts):
            try:
                return await self._fetch_once(store, info, final)
            except DigestMismatch as err:
                if attempt + 1 == self._policy.attempts:
                    raise
                log.warning("wrong bytes, fetching again", error=str(err))
        raise AssertionError("attempts is at least 1")

    async def _fetch_once(self, store: Store, info: ObjectInfo, final: Path) -> Fetched:
        temporary = temporary_beside(final)
        try:
            if info.size_bytes <= self._policy.whole_bytes:
                return await self._fetch_whole(store, info, temporary, final)
            return await self._fetch_ranges(store, info, temporary, final)
        except OSError as err:
            raise os_error(err, final) from err
        finally:
            temporary.unlink(missing_ok=True)

    async def _read(self, store: Store, info: ObjectInfo, start: int, end: int) -> memoryview:
        return await retrying(lambda: store.read(info, start, end), self._policy.attempts)

    async def _fetch_whole(self, store: Store, info: ObjectInfo, temporary: Path, final: Path) -> Fetched:
        def keep(body: memoryview) -> Fetched:
            digest = StreamDigest(with_md5=False)
            digest.update(body)
            fd = _create(temporary, info.size_bytes)
            try:
                _write(fd, body, 0)
                return _publish(fd, temporary, final, digest)
            finally:
                os.close(fd)

        async with self._budget.take(info.size_bytes):
            if info.md5 is None:
                body = await self._read(store, info, 0, info.size_bytes)
            else:
                body, md5 = await self._md5.of(lambda: self._read(store, info, 0, info.size_bytes))
                _check(store, info, md5)
            return await to_thread.run_sync(keep, body)

    async def _fetch_ranges(self, store: Store, info: ObjectInfo, temporary: Path, final: Path) -> Fetched:
        fd = await to_thread.run_sync(_create, temporary, info.size_bytes)
        try:
            hasher = _PrefixHasher(fd, StreamDigest(with_md5=info.md5 is not None))
            turns = anyio.CapacityLimiter(_PARALLEL_RANGES)

            async def one(start: int) -> None:
                end = min(start + self._policy.range_bytes, info.size_bytes)
                async with turns, self._budget.take(end - start):
                    body = await self._read(store, info, start, end)
                    await to_thread.run_sync(_write, fd, body, start)
                await hasher.arrived(start, end)

            try:
                async with anyio.create_task_group() as tasks:
                    for start in range(0, info.size_bytes, self._policy.range_bytes):
                        tasks.start_soon(one, start)
            except* (ForebayError, OSError) as errors:
                raise root_cause(errors) from None
            if hasher.digest.md5 is not None:
                _check(store, info, hasher.digest.md5)
            return await to_thread.run_sync(_publish, fd, temporary, final, hasher.digest)
        finally:
            os.close(fd)


class _PrefixHasher:
    """Digests in order what arrives out of order, from the page cache, behind the writers."""

    def __init__(self, fd: int, digest: StreamDigest) -> None:
        self.digest = digest
        self._fd = fd
        self._ends: dict[int, int] = {}
        self._busy = anyio.Lock()

    async def arrived(self, start: int, end: int) -> None:
        self._ends[start] = end
        async with self._busy:
            while (end_of_next := self._ends.pop(self.digest.size_bytes, None)) is not None:
                await to_thread.run_sync(self._hash_up_to, end_of_next)

    def _hash_up_to(self, end: int) -> None:
        while self.digest.size_bytes < end:
            want = min(end - self.digest.size_bytes, 4 << 20)
            self.digest.update(os.pread(self._fd, want, self.digest.size_bytes))


def _check(store: Store, info: ObjectInfo, md5: str) -> None:
    if md5 != info.md5:
        raise DigestMismatch(
            f"{store.url}/{info.key}: MD5 {md5} came, the store promised {info.md5}",
            hint="the object or the way to it is damaged",
        )


def _create(temporary: Path, size_bytes: int) -> int:
    """Space is taken now, so that a full disk is an error before the transfer, not in it."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        if size_bytes:
            os.posix_fallocate(fd, 0, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write(fd: int, body: memoryview, offset: int) -> None:
    """In steps: one large write makes the kernel look for large free pages, which are cold ones."""
    while body:
        done = os.pwrite(fd, body[:_WRITE_BYTES], offset)
        body, offset = body[done:], offset + done


def _publish(fd: int, temporary: Path, final: Path, digest: StreamDigest) -> Fetched:
    stat = os.fstat(fd)
    temporary.rename(final)
    return Fetched(final, digest.size_bytes, stat.st_blocks * 512, digest.xxh3)
