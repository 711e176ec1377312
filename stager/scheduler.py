"""What to fetch next: by class, then by deadline (or a job's fair share); each shard once.

One fetch per shard however many want it (S5). All waiters of a fetch get its outcome, data or
error (F24). A fetch that is under way for a stage job is raised when a rank comes to wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio
import structlog
from anyio.abc import TaskGroup

from forebay.core import metrics
from forebay.core.config import Settings
from forebay.core.errors import Cancelled, ForebayError, TierFull
from forebay.core.failpoint import failpoint
from forebay.core.protocol import Runway
from forebay.core.units import format_bytes
from forebay.stager.bulk import BulkStream
from forebay.stager.hot import HotTier
from forebay.stager.manifest import Shard
from forebay.stager.plan import NEVER, Plan, PlanBook
from forebay.stager.sources import Sources
from forebay.tiers.budget import Class, Gate, Ticket
from forebay.tiers.filesystem import os_error
from forebay.tiers.landing import Landing

log = structlog.get_logger()

# What is fetched ahead of need lies in the place of what the next epoch would find again. A sixteenth
# of the tier costs that much of the hits and no more.
_LOOKAHEAD_SHARE = 16
# A demand may push out everything that is not in use, whenever it is used next.
_ANYTHING = -1.0
_DISK_TRIES = 3
# Where what a request costs beside its bytes is most of it, several go together.
_SMALL_BYTES = 256 << 10
_SMALL_AT_ONCE = 16


@dataclass(eq=False)
class _Want:
    """A shard that somebody waits for, or that a plan comes to. `done` fires at the end."""

    shard: Shard
    tenant: str
    ticket: Ticket
    waiters: int = 0
    streams: list[BulkStream] = field(default_factory=list)
    fetching: bool = False
    error: ForebayError | None = None
    done: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Scheduler:
    def __init__(
        self, hot: HotTier, plans: PlanBook, sources: Sources, gate: Gate, settings: Settings
    ) -> None:
        self._hot = hot
        self._plans = plans
        self._sources = sources
        self._gate = gate
        self._wants: dict[str, _Want] = {}
        self._failed: set[str] = set()
        self._streams: list[BulkStream] = []
        self._busy = 0
        self._changed = anyio.Event()
        self.fetches = 0
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        self._settings = settings
        self._lookahead_bytes = min(settings.stager.lookahead, self._hot.capacity_bytes // _LOOKAHEAD_SHARE)

    async def demand(
        self, shard: Shard, tenant: str = "", cls: Class = Class.DEMAND, rank: float | None = None
    ) -> None:
        """Returns when the shard is staged. Raises what the fetch raised, or TierFull at the limit.

        `rank` orders within the class: a deadline, or a job's share; now, when it is not given. Below
        DEMAND it pushes out only what is used later than itself.
        """
        if shard.id in self._hot:
            return
        rank = time.monotonic() if rank is None else rank
        want = self._wants.get(shard.id)
        if want is None:
            want = self._wants[shard.id] = _Want(shard, tenant, Ticket(cls, rank))
        else:
            want.ticket.raise_to(cls, rank)
            self._gate.dispatch()
        self.poke()
        want.waiters += 1
        try:
            with anyio.move_on_after(self._settings.stager.wait_s) as limit:
                await want.done.wait()
        finally:
            want.waiters -= 1
            if not want.waiters:
                self._nobody_waits(want)
        if want.error:
            raise want.error
        if limit.cancelled_caught:
            raise self._no_room(shard)

    def _no_room(self, shard: Shard) -> TierFull:
        return TierFull(
            f"waited {self._settings.stager.wait_s:g} s for {shard.name} "
            f"({format_bytes(shard.size_bytes)}): {self._hot.explain_full()}"
        )

    async def to_warm(self, shard: Shard, tenant: str, cls: Class, rank: float) -> None:
        """As `demand`, for the warm tier: by way of the hot one."""
        await self.demand(shard, tenant, cls, rank)
        if found := self._hot.where(shard.id):
            await self._sources.ensure_warm(shard, *found)

    def _nobody_waits(self, want: _Want) -> None:
        """A job that was called off takes its fetches along, unless a plan comes to them."""
        if not want.fetching:
            if self._wants.get(want.shard.id) is want:
                del self._wants[want.shard.id]
        elif (
            want.ticket.cls >= Class.BULK
            and not want.streams
            and self._plans.next_use_bytes(want.shard.id) == NEVER
        ):
            want.scope.cancel()

    async def stage(self, stream: BulkStream) -> None:
        """Bring all of a stream, and tell it of each. When this is called off, so is what it wanted."""
        self._streams.append(stream)
        self.forgive()
        try:
            await stream.done.wait()
        finally:
            self._streams.remove(stream)
            for want in list(self._wants.values()):
                if stream in want.streams:
                    want.streams.remove(stream)
                    if not want.waiters:
                        self._nobody_waits(want)

    def poke(self) -> None:
        """Something changed (a plan, a lease, a demand): look again."""
        self._changed.set()
        self._changed = anyio.Event()

    def lost(self) -> None:
        """Something staged is gone (damage, a disk): plans are looked through again."""
        for _, plan in self._plans.items():
            plan.cursor = plan.position
        self.poke()

    def forgive(self) -> None:
        """A new plan or job: what failed before may be tried ahead of need again."""
        self._failed.clear()
        self.poke()

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            while True:
                changed = self._changed
                while self._start_one(tasks):
                    pass
                with anyio.move_on_after(self._settings.stager.wait_s if self._streams else None):
                    await changed.wait()

    def _start_one(self, tasks: TaskGroup) -> bool:
        wants = self._choose()
        if not wants:
            return False
        for want in wants:
            want.fetching = True
        self._busy += 1
        tasks.start_soon(self._bring, wants)
        return True

    def _choose(self) -> list[_Want]:
        """What to fetch next, with room reserved for it: one shard, or several small ones of a stream."""
        full = self._busy >= self._settings.stager.concurrency
        waiting = self._waiting()
        strongest = Class.RESTORE if full else Class.LOOKAHEAD
        for want in waiting:
            if want.ticket.cls <= strongest and self._admitted(want):
                return [want]
        if full:
            return []
        if ahead := self._next_ahead():
            return [ahead]
        for want in waiting:
            if want.ticket.cls > strongest and self._admitted(want):
                return [want]
        return self._next_of_streams()

    def _waiting(self) -> list[_Want]:
        waiting = [want for want in self._wants.values() if not want.fetching]
        return sorted(waiting, key=lambda want: (want.ticket.cls, want.ticket.rank))

    def _admitted(self, want: _Want) -> bool:
        shard, must = want.shard, want.ticket.cls <= Class.RESTORE
        if shard.id in self._hot:
            self._finish(want, None)
            return False
        next_use_bytes = _ANYTHING if must else self._plans.next_use_bytes(shard.id)
        try:
            admitted = self._hot.reserve(shard, next_use_bytes, want.tenant, must=must)
        except ForebayError as err:
            self._finish(want, err)
            return False
        if admitted and must:
            # It may have pushed out what other plans come to soon.
            self.lost()
        return admitted

    def _next_ahead(self) -> _Want | None:
        """The most urgent shard that a plan comes to and nobody has fetched yet."""
        found = [item for owner, plan in self._plans.items() if (item := self._ahead_in(plan))]
        for deadline, plan, place, shard in sorted(found, key=lambda item: item[0]):
            try:
                if not self._hot.reserve(shard, plan.bytes_until(place), plan.tenant, must=False):
                    return None
            except ForebayError as err:
                log.warning("not fetched ahead", shard=shard.name, error=str(err))
                self._failed.add(shard.id)
                continue
            want = self._wants[shard.id] = _Want(shard, plan.tenant, Ticket(Class.LOOKAHEAD, deadline))
            return want
        return None

    def _ahead_in(self, plan: Plan) -> tuple[float, Plan, int, Shard] | None:
        if not plan.window:
            return None
        for place, shard in plan.ahead(self._reach_bytes(plan), plan.cursor):
            plan.cursor = place
            if shard.id not in self._wants and shard.id not in self._failed and shard.id not in self._hot:
                return time.monotonic() + plan.bytes_until(place) / plan.demand.rate_bps, plan, place, shard
        return None

    def _reach_bytes(self, plan: Plan) -> int:
        return (
            self._lookahead_bytes if plan.keep_bytes is None else min(plan.keep_bytes, self._lookahead_bytes)
        )

    def runway(self, plan: Plan) -> Runway:
        """What lies ahead of that plan without a gap."""
        ahead_bytes = 0
        for _, shard in plan.ahead(self._reach_bytes(plan)):
            if shard.id not in self._hot:
                want = self._wants.get(shard.id)
                tier = "warm" if self._sources.warm else "cold"
                waits = want is None or not want.fetching
                return Runway(ahead_bytes, False, shard.name, "waits" if waits else tier)
            ahead_bytes += shard.size_bytes
        return Runway(ahead_bytes, True)

    def _next_of_streams(self) -> list[_Want]:
        """From the job that has had least for its priority, or whose deadline is near."""
        for stream in sorted(self._streams, key=lambda stream: stream.rank()):
            wants: list[_Want] = []
            while len(wants) < _SMALL_AT_ONCE and (want := self._from(stream, only_small=bool(wants))):
                wants.append(want)
                if want.shard.size_bytes > _SMALL_BYTES or self._sources.warm:
                    break
            if wants:
                return wants
        return []

    def _from(self, stream: BulkStream, *, only_small: bool) -> _Want | None:
        """A want for the first shard of the stream that is not there yet; None when there is no room."""
        while shard := stream.head:
            if shard.id in self._hot:
                stream.finish(stream.take(), None)
                continue
            if known := self._wants.get(shard.id):
                known.streams.append(stream)
                stream.take()
                continue
            if only_small and shard.size_bytes > _SMALL_BYTES:
                return None
            cls, rank = stream.rank()
            try:
                distance = self._plans.next_use_bytes(shard.id)
                if self._hot.reserve(shard, distance, stream.tenant, must=False):
                    stream.take()
                    want = _Want(shard, stream.tenant, Ticket(cls, rank), streams=[stream])
                    self._wants[shard.id] = want
                    return want
                if stream.blocked_s() < self._settings.stager.wait_s:
                    return None
                raise self._no_room(shard)
            except ForebayError as err:
                stream.finish(stream.take(), err)
        return None

    async def _bring(self, wants: list[_Want]) -> None:
        """Several small ones together; who does not come well that way is fetched alone."""
        if len(wants) > 1:
            wants = await self._bring_small(wants)
        for want in wants:
            await self._bring_one(want)
        self._busy -= 1
        self.poke()

    async def _bring_small(self, wants: list[_Want]) -> list[_Want]:
        shards = [want.shard for want in wants]
        by_id = {want.shard.id: want for want in wants}
        try:
            brought = await self._sources.fetch_small(
                shards, lambda shard: self._landing(by_id[shard.id]), wants[0].ticket
            )
        except OSError:
            # Which file the disk refused is found out one by one.
            return wants
        with self._hot.together():
            for want, found in zip(wants, brought, strict=True):
                if found:
                    self._hot.keep(want.shard, found.file, want.tenant)
                    self.fetches += 1
        metrics.stager_fetches.inc(sum(found is not None for found in brought))
        for want, found in zip(wants, brought, strict=True):
            if found:
                self._finish(want, None)
        return [want for want, found in zip(wants, brought, strict=True) if not found]

    async def _bring_one(self, want: _Want) -> None:
        error: ForebayError | None = None
        try:
            with want.scope:
                await self._fetch(want)
        except ForebayError as err:
            log.warning("fetch failed", shard=want.shard.name, code=err.code, error=str(err))
            metrics.stager_errors.labels(err.code).inc()
            self._failed.add(want.shard.id)
            error = err
        if want.scope.cancelled_caught:
            error = Cancelled(f"the fetch of {want.shard.name} was called off")
        self._finish(want, error)

    async def _fetch(self, want: _Want) -> None:
        """A disk that fails under a fetch is gone around: it is tried elsewhere."""
        shard = want.shard
        for attempt in range(_DISK_TRIES):
            try:
                failpoint("fetch.reserved")
                brought = await self._sources.fetch(
                    shard, lambda: self._landing(want), want.ticket, self._elsewhere
                )
            except OSError as err:
                self._hot.cancel(shard, err)
                if attempt + 1 == _DISK_TRIES or not self._hot.reserve(
                    shard, _ANYTHING, want.tenant, must=want.ticket.cls <= Class.LOOKAHEAD
                ):
                    raise os_error(err, self._hot.disks[0].root) from err
            except BaseException:
                self._hot.cancel(shard)
                raise
            else:
                break
        self._hot.keep(shard, brought.file, want.tenant)
        self.fetches += 1
        metrics.stager_fetches.inc()
        self._finish(want, None)
        await self._sources.publish(shard, brought)

    def _landing(self, want: _Want) -> Landing:
        return self._hot.landing(want.shard, want.tenant, soon=want.ticket.cls <= Class.LOOKAHEAD)

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """While another node fetches it, somebody else may have this one's place."""
        self._busy -= 1
        self.poke()
        try:
            yield
        finally:
            self._busy += 1

    def _finish(self, want: _Want, error: ForebayError | None) -> None:
        if self._wants.get(want.shard.id) is want:
            del self._wants[want.shard.id]
        if not want.done.is_set():
            want.error = error
            want.done.set()
            for stream in want.streams:
                stream.finish(want.shard, error)
            want.streams.clear()
