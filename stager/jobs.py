"""Stage jobs: bring shards into a tier, say how far that is, outlive the daemon."""

from __future__ import annotations

import itertools
import secrets
import time
from contextlib import suppress

import anyio
import msgspec
import numpy as np
import numpy.typing as npt
from anyio.abc import TaskGroup

from forebay.core.errors import (
    ForebayError,
    InvalidRequest,
    NotFound,
    TierFull,
    WorkingSetTooLarge,
    WrongState,
)
from forebay.core.protocol import Dataset, ListJobs, Stage, StageJob
from forebay.core.units import format_bytes
from forebay.stager.bulk import BulkStream
from forebay.stager.disk import allocated
from forebay.stager.hot import HotTier
from forebay.stager.jobbook import JobBook
from forebay.stager.manifest import Manifest, Shard
from forebay.stager.pins import Pins
from forebay.stager.plan import Plan, PlanBook
from forebay.stager.registry import Registry
from forebay.stager.scheduler import Scheduler
from forebay.stager.selection import select
from forebay.tiers.budget import Class

_SHARDS_AT_ONCE = 32
# How often a waiting client hears of progress.
_PACE_S = 0.1
_RATE_OVER_S = 5.0
# Versions of a job's next life lie above those of the one before, whose last ones were never written down.
_LIFE = 1 << 32


class StageJobs:
    """A job is a plan with a task: its shards count as wanted, so nothing it brings pushes out another."""

    def __init__(
        self,
        book: JobBook,
        registry: Registry,
        hot: HotTier,
        plans: PlanBook,
        pins: Pins,
        scheduler: Scheduler,
        tasks: TaskGroup,
        *,
        has_warm: bool,
    ) -> None:
        self._book = book
        self._registry = registry
        self._hot = hot
        self._plans = plans
        self._pins = pins
        self._scheduler = scheduler
        self._tasks = tasks
        self._has_warm = has_warm
        self._running: dict[str, _Board] = {}
        # Sessions are numbered from 1 up, so jobs go down: owners of plans never meet.
        self._owners = itertools.count(-1, -1)

    def start(self, request: Stage) -> StageJob:
        """Raises WorkingSetTooLarge or TierFull at once when the selection cannot be held as a whole."""
        dataset = self._registry.find(request.dataset_id)
        manifest = self._registry.manifest(dataset.id)
        if request.priority <= 0:
            raise InvalidRequest(f"priority is {request.priority}", hint="a share above 0; 1 is usual")
        if request.tier == "warm" and not self._has_warm:
            raise InvalidRequest("there is no warm tier on this node", hint="set warm.url")
        numbers = select(manifest, request.selection)
        sizes = manifest.sizes_bytes[numbers]
        if request.tier == "hot":
            self._check_fits(dataset, manifest, numbers)
        owner = request.owner or "job"
        pin = None
        if request.pin or request.pin_s is not None:
            pin = self._pins.add(owner, dataset.id, numbers, request.pin_s).id
        now = time.time()
        job = StageJob(
            id=secrets.token_hex(6),
            dataset=dataset.name,
            dataset_id=dataset.id,
            owner=owner,
            state="running",
            selection=request.selection,
            tier=request.tier,
            priority=request.priority,
            deadline_at=None if request.deadline_s is None else now + request.deadline_s,
            pin=pin,
            shards_total=len(numbers),
            shards_done=0,
            bytes_total=int(sizes.sum()),
            bytes_done=0,
            failed={},
            version=0,
            started_at=now,
            tenant=dataset.tenant,
        )
        self._book.put(job)
        self._begin(job, manifest, numbers)
        return job

    def _check_fits(self, dataset: Dataset, manifest: Manifest, numbers: npt.NDArray[np.int64]) -> None:
        need_bytes = int(allocated(manifest.sizes_bytes[numbers]).sum())
        capacity_bytes = self._hot.capacity_bytes
        if need_bytes > capacity_bytes:
            raise WorkingSetTooLarge(
                f"{dataset.name} takes {format_bytes(need_bytes)}, "
                f"the hot tier holds {format_bytes(capacity_bytes)}",
                hint="raise stager.capacity; a loader can still train on it, shard by shard",
            )
        pinned_bytes = self._pins.bytes_besides(dataset.id, numbers)
        if need_bytes + pinned_bytes > capacity_bytes:
            raise TierFull(
                f"{dataset.name} takes {format_bytes(need_bytes)}, and "
                f"{format_bytes(pinned_bytes)} are pinned: {self._hot.explain_full()}",
                hint="drop a pin, or raise stager.capacity",
            )

    def resume(self) -> None:
        """Jobs that were running when the daemon died go on."""
        for job in self._book.newest():
            if job.state == "running":
                self._begin_again(job)

    def retry(self, job_id: str) -> StageJob:
        """Raises WrongState while it runs, or when nothing failed."""
        job = self.find(job_id)
        if job.state == "running" or not job.failed:
            raise WrongState(f"job {job_id} is {job.state} with {len(job.failed)} failures")
        return self._begin_again(msgspec.structs.replace(job, state="running", ended_at=None))

    def _begin_again(self, job: StageJob) -> StageJob:
        """From the start: what is staged by now is counted at once."""
        try:
            manifest = self._registry.manifest(job.dataset_id)
            numbers = select(manifest, job.selection)
        except ForebayError as err:
            lost = msgspec.structs.replace(job, state="failed", failed={job.dataset: str(err)})
            self._book.put(lost)
            return lost
        version = (job.version // _LIFE + 1) * _LIFE
        fresh = msgspec.structs.replace(job, shards_done=0, bytes_done=0, failed={}, version=version)
        self._book.put(fresh)
        self._begin(fresh, manifest, numbers)
        return fresh

    async def cancel(self, job_id: str) -> StageJob:
        """Raises NotFound. A job that has ended stays as it ended."""
        if board := self._running.get(job_id):
            board.cancelled = True
            board.scope.cancel()
            await board.ended.wait()
        return self.find(job_id)

    def find(self, job_id: str) -> StageJob:
        """As it is now. Raises NotFound."""
        board = self._running.get(job_id)
        return board.job if board else self._book.get(job_id)

    def page(self, wanted: ListJobs) -> list[StageJob]:
        """Newest first."""
        found = (self.find(job.id) for job in self._book.newest(wanted.before))
        return list(itertools.islice((job for job in found if _fits(job, wanted)), wanted.limit))

    async def wait(self, job_id: str, version: int, timeout_s: float) -> StageJob:
        """The job at its end, or soon after it is newer than `version`, or after the time."""
        with anyio.move_on_after(timeout_s):
            while (board := self._running.get(job_id)) and board.job.version <= version:
                await board.moved.wait()
            if board:
                # Not a word for every shard: a thousand small ones would cost more to tell than to fetch.
                with anyio.move_on_after(_PACE_S):
                    await board.ended.wait()
        return self.find(job_id)

    def _begin(self, job: StageJob, manifest: Manifest, numbers: npt.NDArray[np.int64]) -> None:
        board = self._running[job.id] = _Board(job, self._share())
        self._tasks.start_soon(self._run, board, manifest, numbers)

    def _share(self) -> float:
        """A new job begins where the others are, or it would have the tier for itself until it caught up."""
        return min((board.served for board in self._running.values()), default=0.0)

    async def _run(self, board: _Board, manifest: Manifest, numbers: npt.NDArray[np.int64]) -> None:
        tenant = self._registry.find(board.job.dataset_id).tenant
        with board.scope:
            if board.job.tier == "warm":
                await self._to_warm(board, manifest, numbers, tenant)
            else:
                await self._to_hot(board, manifest, numbers, tenant)
        if board.cancelled or not board.scope.cancelled_caught:
            self._book.put(board.finish())
            if board.cancelled and board.job.pin:
                # It may have ended by itself.
                with suppress(NotFound):
                    self._pins.drop(board.job.pin)
        del self._running[board.job.id]
        board.wake()

    async def _to_hot(
        self, board: _Board, manifest: Manifest, numbers: npt.NDArray[np.int64], tenant: str
    ) -> None:
        owner = next(self._owners)
        self._plans.set(owner, Plan(manifest, numbers, 0, tenant))
        try:
            await self._scheduler.stage(
                BulkStream(manifest, numbers, tenant, board.rank, board.taken, board.one_ended)
            )
        finally:
            self._plans.drop(owner)
            self._scheduler.poke()

    async def _to_warm(
        self, board: _Board, manifest: Manifest, numbers: npt.NDArray[np.int64], tenant: str
    ) -> None:
        """By way of the hot tier, some at a time."""
        turns = anyio.CapacityLimiter(_SHARDS_AT_ONCE)

        async def one(shard: Shard) -> None:
            error: ForebayError | None = None
            try:
                await self._scheduler.to_warm(shard, tenant, *board.rank())
            except ForebayError as err:
                error = err
            finally:
                turns.release_on_behalf_of(shard.id)
            board.one_ended(shard, error)

        async with anyio.create_task_group() as tasks:
            for shard in manifest.shards(numbers):
                await turns.acquire_on_behalf_of(shard.id)
                board.taken(shard)
                tasks.start_soon(one, shard)


def _fits(job: StageJob, wanted: ListJobs) -> bool:
    return (
        wanted.state in (None, job.state)
        and wanted.dataset in (None, job.dataset, job.dataset_id)
        and wanted.owner in (None, job.owner)
        and wanted.tenant in (None, job.tenant)
    )


class _Board:
    """A running job's counts; they add up at any time. Only its beginning and its end are kept on disk."""

    def __init__(self, job: StageJob, served: float) -> None:
        self.job = job
        self.served = served
        self.cancelled = False
        self.scope = anyio.CancelScope()
        self.moved = anyio.Event()
        self.ended = anyio.Event()
        self._marks = [(time.monotonic(), 0)]

    def taken(self, shard: Shard) -> None:
        self.served += shard.size_bytes / self.job.priority

    def rank(self) -> tuple[Class, float]:
        """Fair among jobs by what each was served for its priority; a deadline in danger comes before."""
        job = self.job
        if job.deadline_at is not None:
            left_s = job.deadline_at - time.time()
            if left_s < 2 * (job.bytes_total - job.bytes_done) / max(job.rate_bps, 1.0):
                return Class.LOOKAHEAD, time.monotonic() + left_s
        return Class.BULK, self.served

    def one_ended(self, shard: Shard, error: ForebayError | None) -> None:
        if error:
            self._move(failed={**self.job.failed, shard.info.key: str(error)})
        else:
            self._done(shard)

    def _done(self, shard: Shard) -> None:
        bytes_done = self.job.bytes_done + shard.size_bytes
        rate_bps = self._rate(bytes_done)
        eta_s = (self.job.bytes_total - bytes_done) / rate_bps if rate_bps else None
        self._move(
            shards_done=self.job.shards_done + 1, bytes_done=bytes_done, rate_bps=rate_bps, eta_s=eta_s
        )

    def _rate(self, bytes_done: int) -> float:
        now = time.monotonic()
        if now - self._marks[-1][0] > _RATE_OVER_S / 10:
            self._marks.append((now, bytes_done))
            self._marks = [mark for mark in self._marks if now - mark[0] < _RATE_OVER_S] or self._marks[-1:]
        since, then_bytes = self._marks[0]
        return (bytes_done - then_bytes) / (now - since) if now > since else 0.0

    def finish(self) -> StageJob:
        """Done means every shard is there and verified; anything less is a failure (F29)."""
        state = "done"
        if self.cancelled:
            state = "cancelled"
        elif self.job.failed:
            state = "partial" if self.job.shards_done else "failed"
        self._move(state=state, ended_at=time.time(), eta_s=None)
        return self.job

    def wake(self) -> None:
        self.ended.set()
        self.moved.set()

    def _move(self, **changes: object) -> None:
        self.job = msgspec.structs.replace(self.job, version=self.job.version + 1, **changes)
        self.moved.set()
        self.moved = anyio.Event()
