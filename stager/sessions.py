"""Loaders' connections: plans in, descriptors out.

A session's leases, plan and index claims live exactly as long as its connection (DESIGN, idea 2).
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from forebay.core import metrics
from forebay.core.channel import Handler, Reply
from forebay.core.errors import IntegrityError, ProtocolError, WorkingSetTooLarge
from forebay.core.protocol import (
    Advance,
    ClaimIndex,
    Counts,
    Dataset,
    DatasetReply,
    Datasets,
    Done,
    GetCounts,
    GetMetrics,
    GetStatus,
    IndexTask,
    JobReply,
    Jobs,
    ListDatasets,
    ListJobs,
    Message,
    MetricsText,
    NeedShard,
    OpenDataset,
    OpenPlan,
    PublishIndex,
    Register,
    ReleaseShard,
    ShardReady,
    Stage,
    StagerStatus,
    WaitJob,
)
from forebay.core.units import format_bytes
from forebay.stager.catalog import Catalog
from forebay.stager.claims import IndexClaims
from forebay.stager.hot import HotTier
from forebay.stager.jobs import StageJobs
from forebay.stager.manifest import Shard, freeze, list_shards
from forebay.stager.plan import Plan, PlanBook
from forebay.stager.scheduler import Scheduler
from forebay.stager.sources import Sources
from forebay.tiers.store import normalize_url

# A staged file can be found damaged when it is opened; then it is fetched once more.
_OPEN_TRIES = 3


class Stager:
    """What all sessions share."""

    def __init__(
        self,
        catalog: Catalog,
        hot: HotTier,
        plans: PlanBook,
        scheduler: Scheduler,
        sources: Sources,
        jobs: StageJobs,
        status: Callable[[int], StagerStatus],
    ) -> None:
        self.catalog = catalog
        self.hot = hot
        self.plans = plans
        self.scheduler = scheduler
        self.sources = sources
        self.jobs = jobs
        self.status = status
        self.claims = IndexClaims(catalog)
        self.live = 0
        self.numbers = itertools.count(1)
        self._listing: dict[str, anyio.Lock] = {}

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
            infos = await list_shards(self.sources.store(url), request.format, request.keys)
            frozen = freeze(infos, self.catalog.manifests_folder)
            return self.catalog.add_dataset(request.name, url, request.format, frozen)

    def with_progress(self, dataset: Dataset) -> Dataset:
        manifest = self.catalog.manifest(dataset.id)
        staged = [s for s in map(manifest.shard, range(len(manifest))) if s.id in self.hot]
        return msgspec.structs.replace(
            dataset, staged_shards=len(staged), staged_bytes=sum(s.size_bytes for s in staged)
        )


class Session:
    """One connection."""

    def __init__(self, stager: Stager, number: int) -> None:
        self._stager = stager
        self._number = number
        self._leases: Counter[str] = Counter()
        self._handlers: dict[type[Message], Callable[[Any], Awaitable[Reply]]] = {
            Register: self._register,
            OpenDataset: self._open_dataset,
            ListDatasets: self._list_datasets,
            OpenPlan: self._open_plan,
            Advance: self._advance,
            NeedShard: self._need_shard,
            ReleaseShard: self._release_shard,
            PublishIndex: self._publish_index,
            GetCounts: self._get_counts,
            ClaimIndex: self._claim_index,
            Stage: self._stage,
            WaitJob: self._wait_job,
            ListJobs: self._list_jobs,
            GetStatus: self._get_status,
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
        self._stager.scheduler.poke()

    # Datasets

    async def _register(self, request: Register) -> Reply:
        return self._dataset_reply(await self._stager.register(request))

    async def _open_dataset(self, request: OpenDataset) -> Reply:
        return self._dataset_reply(self._stager.catalog.dataset(request.name))

    def _dataset_reply(self, dataset: Dataset) -> Reply:
        manifest = self._stager.catalog.manifest(dataset.id)
        return DatasetReply(dataset), [os.open(manifest.path, os.O_RDONLY | os.O_CLOEXEC)]

    async def _list_datasets(self, request: ListDatasets) -> Reply:
        return Datasets([self._stager.with_progress(d) for d in self._stager.catalog.datasets()]), ()

    # Shards

    async def _open_plan(self, request: OpenPlan) -> Reply:
        manifest = self._stager.catalog.manifest(request.dataset_id)
        cut = {number: manifest.shard(number) for number in set(request.shards)}
        plan = Plan(request.dataset_id, [cut[number] for number in request.shards], request.window)
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
            plan.advance(request.position)
            self._stager.scheduler.poke()
        return Done(), ()

    async def _need_shard(self, request: NeedShard) -> Reply:
        shard = self._stager.catalog.manifest(request.dataset_id).shard(request.shard)
        self._lease(shard)
        try:
            with metrics.stager_wait_seconds.time():
                fd, digest = await self._opened(shard)
        except BaseException:
            self._unlease(shard)
            raise
        index = self._stager.catalog.index_path(shard.id)
        fds = [fd]
        if self._stager.catalog.samples(shard.id) >= 0:
            fds.append(os.open(index, os.O_RDONLY | os.O_CLOEXEC))
        return ShardReady(shard.size_bytes, digest, len(fds) > 1), fds

    async def _opened(self, shard: Shard) -> tuple[int, str]:
        (metrics.stager_hits if shard.id in self._stager.hot else metrics.stager_misses).inc()
        for _ in range(_OPEN_TRIES):
            if found := await self._stager.hot.open(shard.id):
                return found[0], found[1].digest
            await self._stager.scheduler.demand(shard)
        raise IntegrityError(f"{shard.name} was staged {_OPEN_TRIES} times and found damaged each time")

    async def _release_shard(self, request: ReleaseShard) -> Reply:
        self._unlease(self._stager.catalog.manifest(request.dataset_id).shard(request.shard))
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
        shard = self._stager.catalog.manifest(request.dataset_id).shard(request.shard)
        self._stager.catalog.add_index(shard.id, request.samples, request.payload)
        self._stager.claims.indexed(self._number, shard)
        return Done(), ()

    async def _get_counts(self, request: GetCounts) -> Reply:
        manifest = self._stager.catalog.manifest(request.dataset_id)
        ids = (manifest.shard(number).id for number in range(len(manifest)))
        return Counts([self._stager.catalog.samples(object_id) for object_id in ids]), ()

    async def _claim_index(self, request: ClaimIndex) -> Reply:
        manifest = self._stager.catalog.manifest(request.dataset_id)
        return IndexTask(await self._stager.claims.claim(self._number, manifest)), ()

    # Stage jobs

    async def _stage(self, request: Stage) -> Reply:
        return JobReply(self._stager.jobs.start(self._stager.catalog.dataset(request.dataset_id))), ()

    async def _wait_job(self, request: WaitJob) -> Reply:
        return JobReply(await self._stager.jobs.wait(request.job_id, request.version, request.timeout_s)), ()

    async def _list_jobs(self, request: ListJobs) -> Reply:
        return Jobs(self._stager.jobs.all()), ()

    # State

    async def _get_status(self, request: GetStatus) -> Reply:
        return self._stager.status(self._stager.live), ()

    async def _get_metrics(self, request: GetMetrics) -> Reply:
        return MetricsText(metrics.render(metrics.STAGER)), ()
