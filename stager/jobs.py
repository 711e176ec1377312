"""Stage jobs: bring a whole dataset into the hot tier, and say how far that is."""

from __future__ import annotations

import itertools
import secrets

import anyio
import msgspec
from anyio.abc import TaskGroup

from forebay.core.errors import ForebayError, WorkingSetTooLarge
from forebay.core.protocol import Dataset, StageJob
from forebay.core.units import format_bytes
from forebay.stager.catalog import Catalog
from forebay.stager.hot import HotTier, allocated
from forebay.stager.manifest import Manifest, Shard
from forebay.stager.plan import Plan, PlanBook
from forebay.stager.scheduler import Scheduler

# The rest of a job waits in its plan, where loaders' demands pass it.
_SHARDS_AT_ONCE = 32
# How often a waiting client hears of progress.
_PACE_S = 0.1


class StageJobs:
    """A job is a plan with a task: its shards count as wanted, so nothing it brings pushes out another."""

    def __init__(
        self, catalog: Catalog, hot: HotTier, plans: PlanBook, scheduler: Scheduler, tasks: TaskGroup
    ) -> None:
        self._catalog = catalog
        self._hot = hot
        self._plans = plans
        self._scheduler = scheduler
        self._tasks = tasks
        self._running: dict[str, _Board] = {}
        # Sessions are numbered from 1 up, so jobs go down: owners of plans never meet.
        self._owners = itertools.count(-1, -1)

    def start(self, dataset: Dataset) -> StageJob:
        """Raises WorkingSetTooLarge at once when the dataset cannot be held as a whole."""
        manifest = self._catalog.manifest(dataset.id)
        need_bytes = sum(allocated(size) for size in manifest.sizes_bytes)
        if need_bytes > self._hot.capacity_bytes:
            raise WorkingSetTooLarge(
                f"{dataset.name} takes {format_bytes(need_bytes)}, "
                f"the hot tier holds {format_bytes(self._hot.capacity_bytes)}",
                hint="raise stager.capacity; a loader can still train on it, shard by shard",
            )
        job = StageJob(
            secrets.token_hex(6), dataset.name, "running", len(manifest), 0, dataset.size_bytes, 0, {}, 0
        )
        self._catalog.put_job(job)
        self._begin(job, dataset.id, manifest)
        return job

    def resume(self) -> None:
        """Jobs that were running when the daemon died go on."""
        for job in self._catalog.jobs():
            if job.state == "running":
                try:
                    dataset = self._catalog.dataset(job.dataset)
                    manifest = self._catalog.manifest(dataset.id)
                except ForebayError as err:
                    lost = msgspec.structs.replace(job, state="failed", failed={job.dataset: str(err)})
                    self._catalog.put_job(lost)
                    continue
                fresh = msgspec.structs.replace(job, shards_done=0, bytes_done=0, failed={})
                self._begin(fresh, dataset.id, manifest)

    def find(self, job_id: str) -> StageJob:
        """As it is now. Raises NotFound."""
        board = self._running.get(job_id)
        return board.job if board else self._catalog.job(job_id)

    def all(self) -> list[StageJob]:
        return [self.find(job.id) for job in self._catalog.jobs()]

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

    def _begin(self, job: StageJob, dataset_id: str, manifest: Manifest) -> None:
        board = self._running[job.id] = _Board(job)
        self._tasks.start_soon(self._run, board, dataset_id, manifest)

    async def _run(self, board: _Board, dataset_id: str, manifest: Manifest) -> None:
        owner = next(self._owners)
        shards = [manifest.shard(number) for number in range(len(manifest))]
        self._plans.set(owner, Plan(dataset_id, shards, window=0))
        self._scheduler.forgive()
        turns = anyio.CapacityLimiter(_SHARDS_AT_ONCE)
        try:
            async with anyio.create_task_group() as tasks:
                for shard in shards:
                    await turns.acquire_on_behalf_of(shard.id)
                    tasks.start_soon(self._one, shard, board, turns)
        finally:
            self._plans.drop(owner)
            self._scheduler.poke()
        self._catalog.put_job(board.finish())
        del self._running[board.job.id]
        board.wake()

    async def _one(self, shard: Shard, board: _Board, turns: anyio.CapacityLimiter) -> None:
        try:
            await self._scheduler.demand(shard, bulk=True)
            board.done(shard)
        except ForebayError as err:
            board.failed(shard, err)
        finally:
            turns.release_on_behalf_of(shard.id)


class _Board:
    """A running job's counts; they add up at any time. Only its beginning and its end are kept on disk."""

    def __init__(self, job: StageJob) -> None:
        self.job = job
        self.moved = anyio.Event()
        self.ended = anyio.Event()

    def done(self, shard: Shard) -> None:
        self._move(shards_done=self.job.shards_done + 1, bytes_done=self.job.bytes_done + shard.size_bytes)

    def failed(self, shard: Shard, err: ForebayError) -> None:
        self._move(failed={**self.job.failed, shard.info.key: str(err)})

    def finish(self) -> StageJob:
        """Done means every shard is there and verified; anything less is failed (F29)."""
        self.job = msgspec.structs.replace(
            self.job, state="failed" if self.job.failed else "done", version=self.job.version + 1
        )
        return self.job

    def wake(self) -> None:
        self.ended.set()
        self.moved.set()

    def _move(self, **changes: object) -> None:
        self.job = msgspec.structs.replace(self.job, version=self.job.version + 1, **changes)
        self.moved.set()
        self.moved = anyio.Event()
