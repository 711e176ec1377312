"""Loaders' connections: plans in, descriptors out.

A session's leases, plan and index claims live exactly as long as its connection (DESIGN, idea 2).
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec

from forebay.core import metrics, recent
from forebay.core.channel import Handler, Reply
from forebay.core.errors import IntegrityError, ProtocolError, WorkingSetTooLarge
from forebay.core.protocol import (
    AddPin,
    Advance,
    CancelJob,
    ClaimIndex,
    Counts,
    Dataset,
    DatasetReply,
    Datasets,
    Done,
    DropPin,
    Evict,
    FindDataset,
    GetCounts,
    GetMetrics,
    GetStatus,
    IndexTask,
    JobReply,
    Jobs,
    ListDatasets,
    ListJobs,
    ListPins,
    ListProblems,
    ListRanks,
    ListShards,
    Message,
    MetricsText,
    NeedShard,
    Once,
    OpenDataset,
    OpenPlan,
    Pace,
    PinReply,
    Problems,
    PublishIndex,
    Ranks,
    Register,
    ReleaseShard,
    RetryJob,
    Runway,
    ShardReady,
    Stage,
    StagerStatus,
    TakeBandwidth,
    WaitJob,
)
from forebay.core.protocol import Pins as PinList
from forebay.core.units import format_bytes
from forebay.stager.claims import IndexClaims
from forebay.stager.hot import HotTier
from forebay.stager.indices import Indices
from forebay.stager.jobs import StageJobs
from forebay.stager.listing import list_shards
from forebay.stager.manifest import Shard, freeze
from forebay.stager.once import OnceBook
from forebay.stager.pins import Pins
from forebay.stager.plan import Plan, PlanBook
from forebay.stager.ranks import RankBoard
from forebay.stager.registry import Registry
from forebay.stager.scheduler import Scheduler
from forebay.stager.selection import select
from forebay.stager.shards import give_up, shard_page
from forebay.stager.sources import Sources
from forebay.tiers.budget import Class, Gate, Ticket
from forebay.tiers.flow import Open
from forebay.tiers.store import normalize_url

# What checkpointd moves shares rate and classes, but goes to a server of its own.
_UPLINK = Open()
# A staged file can be found damaged when it is opened; then it is fetched once more.
_OPEN_TRIES = 3


@dataclass(eq=False)
class Stager:
    """What all sessions share."""

    registry: Registry
    hot: HotTier
    plans: PlanBook
    pins: Pins
    scheduler: Scheduler
    sources: Sources
    gate: Gate
    jobs: StageJobs
    claims: IndexClaims
    indices: Indices
    once: OnceBook
    ranks: RankBoard
    status: Callable[[int, int], StagerStatus]
    live: int = 0
    read_bytes: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _listing: dict[str, anyio.Lock] = field(default_factory=dict)

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[Handler]:
        session = Session(self, next(self.numbers))
        self.live += 1
        metrics.stager_sessions.set(self.live)
        try:
            yield session.handle
        finally:
            session.close()
            self.live -= 1
            metrics.stager_sessions.set(self.live)

    async def register(self, request: Register) -> Dataset:
        """One listing at a time per source: ranks that start together share it (F6)."""
        url = normalize_url(request.url)
        async with self._listing.setdefault(url, anyio.Lock()):
            infos = list_shards(self.sources.store(url), request.format, request.keys)
            frozen = await freeze(infos, url, self.registry.manifests_folder, by_key=request.keys is None)
            return self.registry.add(request.name, url, request.format, request.tenant, frozen)

    def with_progress(self, dataset: Dataset) -> Dataset:
        manifest = self.registry.manifest(dataset.id)
        numbers = manifest.numbers_of(self.hot.ids())
        sizes = manifest.sizes_bytes[numbers[numbers >= 0]]
        return msgspec.structs.replace(dataset, staged_shards=len(sizes), staged_bytes=int(sizes.sum()))


class Session:
    """One connection."""

    def __init__(self, stager: Stager, number: int) -> None:
        self._stager = stager
        self._number = number
        self._leases: Counter[str] = Counter()
        self._handlers: dict[type[Message], Callable[[Any], Awaitable[Reply]]] = {
            Register: self._register,
            OpenDataset: self._open_dataset,
            FindDataset: self._find_dataset,
            ListDatasets: self._list_datasets,
            OpenPlan: self._open_plan,
            Advance: self._advance,
            Pace: self._pace,
            NeedShard: self._need_shard,
            ReleaseShard: self._release_shard,
            PublishIndex: self._publish_index,
            GetCounts: self._get_counts,
            ClaimIndex: self._claim_index,
            Stage: self._stage,
            WaitJob: self._wait_job,
            CancelJob: self._cancel_job,
            RetryJob: self._retry_job,
            ListJobs: self._list_jobs,
            AddPin: self._add_pin,
            DropPin: self._drop_pin,
            ListPins: self._list_pins,
            Evict: self._evict,
            TakeBandwidth: self._take_bandwidth,
            GetStatus: self._get_status,
            ListShards: self._list_shards,
            ListRanks: self._list_ranks,
            ListProblems: self._list_problems,
            Once: self._once,
            GetMetrics: self._get_metrics,
        }

    async def handle(self, message: Message, fds: list[int]) -> Reply:
        handler = self._handlers.get(type(message))
        if handler is None or fds:
            raise ProtocolError(f"stagerd has no answer to {type(message).__name__}")
        return await handler(message)

    def close(self) -> None:
        """Everything the session held is free again (S7)."""
        for object_id, count in self._leases.items():
            for _ in range(count):
                self._stager.hot.release(object_id)
        self._leases.clear()
        self._stager.plans.drop(self._number)
        self._stager.claims.drop(self._number)
        self._stager.ranks.gone(self._number)
        self._stager.scheduler.poke()

    # Datasets

    async def _register(self, request: Register) -> Reply:
        return self._dataset_reply(await self._stager.register(request))

    async def _open_dataset(self, request: OpenDataset) -> Reply:
        return self._dataset_reply(self._stager.registry.find(request.name))

    def _dataset_reply(self, dataset: Dataset) -> Reply:
        manifest = self._stager.registry.manifest(dataset.id)
        return DatasetReply(dataset), [os.open(manifest.path, os.O_RDONLY | os.O_CLOEXEC)]

    async def _find_dataset(self, request: FindDataset) -> Reply:
        return DatasetReply(
            self._stager.with_progress(self._stager.registry.find(request.name, request.tenant))
        ), ()

    async def _list_datasets(self, request: ListDatasets) -> Reply:
        return Datasets([self._stager.with_progress(d) for d in self._stager.registry.all()]), ()

    # Shards

    async def _open_plan(self, request: OpenPlan) -> Reply:
        dataset = self._stager.registry.find(request.dataset_id)
        manifest = self._stager.registry.manifest(dataset.id)
        plan = Plan(manifest, request.shards, request.window, dataset.tenant, request.name)
        need_bytes = self._stager.plans.working_set_bytes(self._number, plan)
        capacity_bytes = self._stager.hot.capacity_bytes
        if need_bytes > capacity_bytes:
            raise WorkingSetTooLarge(
                f"the loaders of this node hold up to {format_bytes(need_bytes)} open at once "
                f"({request.window} shards each), the hot tier holds {format_bytes(capacity_bytes)}"
            )
        self._stager.plans.set(self._number, plan)
        self._stager.scheduler.forgive()
        return Done(), ()

    async def _advance(self, request: Advance) -> Reply:
        if plan := self._stager.plans.of(self._number):
            passed = plan.advance(request.position)
            self._stager.read_bytes += int(plan.manifest.sizes_bytes[passed].sum()) if passed else 0
            for number in passed:
                self._stager.hot.used(plan.manifest.shard(number).id)
            self._stager.scheduler.poke()
        return Done(), ()

    async def _pace(self, request: Pace) -> Reply:
        plan = self._stager.plans.named(request.plan)
        if plan is None:
            return Runway(0, True), ()
        if request.state:
            self._stager.ranks.told(self._number, request.state, plan.manifest.url, plan.tenant)
        if plan.keep_bytes != request.keep_bytes:
            plan.keep_bytes = request.keep_bytes
            plan.cursor = plan.position
            self._stager.scheduler.poke()
        return self._stager.scheduler.runway(plan), ()

    async def _need_shard(self, request: NeedShard) -> Reply:
        dataset = self._stager.registry.find(request.dataset_id)
        shard = self._stager.registry.manifest(dataset.id).shard(request.shard)
        self._lease(shard)
        try:
            # Asked for first: once a descriptor is open nothing is waited for any more.
            await self._stager.indices.bring(shard, request.index)
            with metrics.stager_wait_seconds.time():
                fd, digest = await self._opened(shard, dataset.tenant)
        except BaseException:
            self._unlease(shard)
            raise
        index = self._stager.indices.open(shard, request.index)
        fds = [fd] if index is None else [fd, index]
        return ShardReady(shard.size_bytes, digest, len(fds) > 1), fds

    async def _opened(self, shard: Shard, tenant: str) -> tuple[int, str]:
        began_at = time.monotonic()
        try:
            for attempt in range(_OPEN_TRIES):
                found = await self._stager.hot.open(shard.id)
                if attempt == 0:
                    (metrics.stager_hits if found else metrics.stager_misses).inc()
                if found:
                    return found
                await self._stager.scheduler.demand(shard, tenant)
        finally:
            if plan := self._stager.plans.of(self._number):
                plan.demand.waited(time.monotonic() - began_at)
        raise IntegrityError(f"{shard.name} was staged {_OPEN_TRIES} times and found damaged each time")

    async def _release_shard(self, request: ReleaseShard) -> Reply:
        self._unlease(self._stager.registry.manifest(request.dataset_id).shard(request.shard))
        self._stager.scheduler.poke()
        return Done(), ()

    def _lease(self, shard: Shard) -> None:
        self._leases[shard.id] += 1
        self._stager.hot.lease(shard.id)

    def _unlease(self, shard: Shard) -> None:
        if self._leases[shard.id] > 0:
            self._leases[shard.id] -= 1
            self._stager.hot.release(shard.id)

    # Sample indices

    async def _publish_index(self, request: PublishIndex) -> Reply:
        shard = self._stager.registry.manifest(request.dataset_id).shard(request.shard)
        await self._stager.indices.add(shard, request.index, request.samples, request.payload)
        self._stager.claims.indexed(shard, request.index)
        return Done(), ()

    async def _get_counts(self, request: GetCounts) -> Reply:
        manifest = self._stager.registry.manifest(request.dataset_id)
        ids = (manifest.shard(number).id for number in range(len(manifest)))
        return Counts([self._stager.registry.samples(object_id, request.index) for object_id in ids]), ()

    async def _claim_index(self, request: ClaimIndex) -> Reply:
        number = await self._stager.claims.claim(self._number, request.dataset_id, request.index)
        return IndexTask(number), ()

    # Stage jobs, pins, evictions

    async def _stage(self, request: Stage) -> Reply:
        return JobReply(self._stager.jobs.start(request)), ()

    async def _wait_job(self, request: WaitJob) -> Reply:
        return JobReply(await self._stager.jobs.wait(request.job_id, request.version, request.timeout_s)), ()

    async def _cancel_job(self, request: CancelJob) -> Reply:
        return JobReply(await self._stager.jobs.cancel(request.job_id)), ()

    async def _retry_job(self, request: RetryJob) -> Reply:
        return JobReply(self._stager.jobs.retry(request.job_id)), ()

    async def _list_jobs(self, request: ListJobs) -> Reply:
        return Jobs(self._stager.jobs.page(request)), ()

    async def _add_pin(self, request: AddPin) -> Reply:
        dataset = self._stager.registry.find(request.dataset_id)
        numbers = select(self._stager.registry.manifest(dataset.id), request.selection)
        return PinReply(self._stager.pins.add(request.owner, dataset.id, numbers, request.ttl_s)), ()

    async def _drop_pin(self, request: DropPin) -> Reply:
        self._stager.pins.drop(request.pin_id)
        return Done(), ()

    async def _list_pins(self, request: ListPins) -> Reply:
        return PinList(self._stager.pins.all()), ()

    async def _evict(self, request: Evict) -> Reply:
        dataset = self._stager.registry.find(request.dataset_id)
        manifest = self._stager.registry.manifest(dataset.id)
        numbers = select(manifest, request.selection)
        evicted = await give_up(manifest, numbers, self._stager.hot, dry_run=request.dry_run)
        if not request.dry_run:
            for disk in self._stager.hot.disks:
                await disk.clear()
            self._stager.scheduler.poke()
        return evicted, ()

    # Bandwidth

    async def _take_bandwidth(self, request: TakeBandwidth) -> Reply:
        ticket = Ticket(Class.RESTORE if request.restore else Class.DRAIN, time.monotonic())
        async with self._stager.gate.turn(_UPLINK, ticket, 0):
            self._stager.gate.rate.take(request.size_bytes)
        metrics.stager_granted_bytes.labels(ticket.cls.name.lower()).inc(request.size_bytes)
        return Done(), ()

    # State

    async def _get_status(self, request: GetStatus) -> Reply:
        return self._stager.status(self._stager.live, self._stager.read_bytes), ()

    async def _list_shards(self, request: ListShards) -> Reply:
        dataset = self._stager.registry.find(request.dataset_id)
        return await shard_page(request, self._stager.registry.manifest(dataset.id), self._stager.hot), ()

    async def _list_ranks(self, request: ListRanks) -> Reply:
        return Ranks(self._stager.ranks.all()), ()

    async def _list_problems(self, request: ListProblems) -> Reply:
        return Problems(recent.newest()), ()

    async def _once(self, request: Once) -> Reply:
        return await self._stager.once.once(request, lambda inner: self.handle(inner, []))

    async def _get_metrics(self, request: GetMetrics) -> Reply:
        return MetricsText(metrics.render(metrics.STAGER)), ()
