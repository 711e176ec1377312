"""Move one object from a store to where it lands, verified.

The bytes come in one GET when the object is small and in parallel ranges when it is large; each
request takes its turn at the daemon's gate. Digests are taken while they arrive. Only when length
and digests fit does the landing become visible; whatever else happens, nothing of it can be opened.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import anyio
import structlog
from anyio import to_thread
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type
from tenacity.wait import wait_random_exponential

from forebay.core.config import TransferSettings
from forebay.core.errors import (
    DigestMismatch,
    ForebayError,
    ObjectChanged,
    ShortBody,
    StoreBusy,
    StoreUnreachable,
    root_cause,
)
from forebay.tiers.budget import Class, Gate, Ticket
from forebay.tiers.digest import PrefixDigest, digest_bytes
from forebay.tiers.flow import Flow, Preempted
from forebay.tiers.landing import Fetched, Landing
from forebay.tiers.md5 import Md5Lanes, Md5Stream, md5_of
from forebay.tiers.store import Grant, ObjectInfo, Store

log = structlog.get_logger()
T = TypeVar("T")

_TRANSIENT = (StoreUnreachable, StoreBusy, ShortBody)
_PATIENCE = 2
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0


async def retrying(call: Callable[[], Awaitable[T]], attempts: int) -> T:
    """Try again what may pass by itself, with full jitter (so that many waiters spread out).

    A server that is busy says nothing about this request: it gets twice as many tries.
    """
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(_TRANSIENT),
        wait=wait_random_exponential(_FIRST_WAIT_S, _LONGEST_WAIT_S),
        stop=partial(_enough, attempts),
        before_sleep=_say,
        sleep=anyio.sleep,
        reraise=True,
    ):
        with attempt:
            return await call()
    raise AssertionError("tenacity either returns or raises")


def _enough(attempts: int, state: RetryCallState) -> bool:
    busy = state.outcome is not None and isinstance(state.outcome.exception(), StoreBusy)
    return state.attempt_number >= attempts * (_PATIENCE if busy else 1)


def _say(state: RetryCallState) -> None:
    if state.outcome and state.next_action:
        wait_s = round(state.next_action.sleep, 2)
        log.warning("trying again", error=str(state.outcome.exception()), wait_s=wait_s)


class Transfers:
    """All transfers of a daemon: one policy, one gate, one place for checksums."""

    def __init__(self, policy: TransferSettings, gate: Gate, grant: Grant | None = None) -> None:
        """`grant`: who else has a say, asked before each request."""
        self._policy = policy
        self._gate = gate
        self._grant = grant
        self._md5 = Md5Lanes()

    async def fetch(
        self,
        store: Store,
        flow: Flow,
        info: ObjectInfo,
        landing: Callable[[], Landing],
        ticket: Ticket,
        digest: str | None = None,
    ) -> Fetched:
        """Bring `info` to a landing; with `digest`, only bytes of that xxh3-128 are let through.

        Wrong bytes are fetched again, up to `attempts` times, unless a digest says that the copy itself
        is wrong. Raises StoreError, ObjectChanged,
        DigestMismatch (with what was expected and what came), OSError of the disk below the landing.
        """
        for attempt in range(self._policy.attempts):
            try:
                return await _Fetch(self, store, flow, info, landing(), ticket, digest).run()
            except DigestMismatch as err:
                if digest is not None or attempt + 1 == self._policy.attempts:
                    raise
                log.warning("wrong bytes, fetching again", error=str(err))
        raise AssertionError("attempts is at least 1")

    async def fetch_small(
        self, store: Store, flow: Flow, items: list[tuple[ObjectInfo, Landing]], ticket: Ticket
    ) -> list[Fetched | None]:
        """Several small objects in one turn, one after the other: what each costs beside its bytes is shared.

        None for one that did not come well; nothing of it stays, and `fetch` may be asked for it.
        """
        total_bytes = sum(info.size_bytes for info, _ in items)
        async with self._gate.turn(flow, ticket, total_bytes):
            bodies: list[memoryview | None] = []
            for info, _ in items:
                try:
                    body = await flow.observed(partial(store.read, info, 0, info.size_bytes), info.size_bytes)
                except ForebayError:
                    body = None
                bodies.append(body)
            return await to_thread.run_sync(_land_all, items, bodies)

    async def piece(
        self,
        store: Store,
        flow: Flow,
        info: ObjectInfo,
        start: int,
        end: int,
        ticket: Ticket,
        use: Callable[[Callable[[], Awaitable[memoryview]]], Awaitable[T]],
    ) -> T:
        """One request in its turn, tried again when that may help. `use` reads, and consumes what came."""

        async def once() -> T:
            if self._grant:
                await self._grant(end - start)
            async with self._gate.turn(flow, ticket, end - start) as turn:

                async def read() -> memoryview:
                    call = partial(store.read, info, start, end)
                    if ticket.cls <= Class.LOOKAHEAD:
                        body = await flow.hedged_call(call, end - start)
                    else:
                        body = await flow.preemptibly(partial(flow.observed, call, end - start))
                    self._gate.answered(turn)
                    return body

                return await use(read)

        while True:
            with suppress(Preempted):
                return await retrying(once, self._policy.attempts)


def _land_all(
    items: list[tuple[ObjectInfo, Landing]], bodies: list[memoryview | None]
) -> list[Fetched | None]:
    """Raises OSError of the disk."""
    digests = iter(md5_of([body for body in bodies if body is not None]))
    landed: list[Fetched | None] = []
    for (info, landing), body in zip(items, bodies, strict=True):
        if body is None or (next(digests) != info.md5 and info.md5 is not None):
            landed.append(None)
        else:
            landed.append(_land(landing, info, body, landing.publish))
    return landed


def _land(landing: Landing, info: ObjectInfo, body: memoryview, publish: Callable[[str], Fetched]) -> Fetched:
    try:
        landing.begin(info, info.size_bytes)
        landing.write(body, 0)
        return publish(digest_bytes(body))
    finally:
        landing.close(keep=False)


class _Fetch:
    """One try at one object."""

    def __init__(
        self,
        transfers: Transfers,
        store: Store,
        flow: Flow,
        info: ObjectInfo,
        landing: Landing,
        ticket: Ticket,
        digest: str | None,
    ) -> None:
        self._digest = digest
        self._transfers = transfers
        self._store = store
        self._flow = flow
        self._info = info
        self._landing = landing
        self._ticket = ticket
        self._policy = transfers._policy
        self._writing = anyio.Lock()

    async def run(self) -> Fetched:
        keep = False
        try:
            if self._info.size_bytes <= self._policy.whole_bytes:
                return await self._whole()
            return await self._ranges()
        except (DigestMismatch, ObjectChanged, OSError):
            raise
        except BaseException:
            keep = True
            raise
        finally:
            if self._landing.fd >= 0:
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(lambda: self._landing.close(keep=keep))

    async def _whole(self) -> Fetched:
        size_bytes = self._info.size_bytes

        async def use(read: Callable[[], Awaitable[memoryview]]) -> Fetched:
            if self._info.md5 is None:
                body = await read()
            else:
                body, md5 = await self._transfers._md5.of(read, alone=self._ticket.cls == Class.DEMAND)
                self._check(md5)
            return await to_thread.run_sync(_land, self._landing, self._info, body, self._publish)

        return await self._transfers.piece(
            self._store, self._flow, self._info, 0, size_bytes, self._ticket, use
        )

    async def _ranges(self) -> Fetched:
        if self._info.md5 is None:
            return await self._in_ranges(None)
        with self._transfers._md5.stream() as md5:
            return await self._in_ranges(md5)

    async def _in_ranges(self, md5: Md5Stream | None) -> Fetched:
        range_bytes, size_bytes = self._policy.range_bytes, self._info.size_bytes
        there = set(await to_thread.run_sync(self._landing.begin, self._info, range_bytes))
        digest = PrefixDigest(self._landing.fd, md5.update if md5 else None)
        under_way, ended = 0, anyio.Event()

        async def one(number: int, start: int, end: int) -> None:
            nonlocal under_way, ended
            try:
                await self._range(number, start, end, digest)
            finally:
                under_way -= 1
                ended.set()
                ended = anyio.Event()

        try:
            with self._flow.in_ranges() as most:
                async with anyio.create_task_group() as tasks:
                    for number, start in enumerate(range(0, size_bytes, range_bytes)):
                        end = min(start + range_bytes, size_bytes)
                        if number in there:
                            tasks.start_soon(digest.written, start, end)
                            continue
                        while under_way >= most(self._ticket.cls):
                            await ended.wait()
                        under_way += 1
                        tasks.start_soon(one, number, start, end)
        except* (ForebayError, OSError) as errors:
            raise root_cause(errors) from None
        if md5:
            self._check(md5.hexdigest())
        return await to_thread.run_sync(self._publish, digest.hexdigest())

    async def _range(self, number: int, start: int, end: int, digest: PrefixDigest) -> None:
        def keep(body: memoryview) -> None:
            self._landing.write(body, start)
            self._landing.arrived(number)

        async def use(read: Callable[[], Awaitable[memoryview]]) -> None:
            body = await read()
            # What came is kept, even when another range has failed: a later try goes on from it.
            with anyio.CancelScope(shield=True):
                async with self._writing:
                    await to_thread.run_sync(keep, body)
            await digest.written(start, end, body)

        await self._transfers.piece(self._store, self._flow, self._info, start, end, self._ticket, use)

    def _publish(self, digest: str) -> Fetched:
        if self._digest not in (None, digest):
            raise DigestMismatch(f"{self._store.url}/{self._info.key}: {digest} came, not {self._digest}")
        return self._landing.publish(digest)

    def _check(self, md5: str) -> None:
        if md5 != self._info.md5:
            raise DigestMismatch(
                f"{self._store.url}/{self._info.key}: MD5 {md5} came, the store promised {self._info.md5}",
                hint="the object or the way to it is damaged",
            )
