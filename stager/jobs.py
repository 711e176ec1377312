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
        self._moved: dict[str, anyio.Event] = {}
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
                    self._note(msgspec.structs.replace(job, state="failed", failed={job.dataset: str(err)}))
                    continue
                fresh = msgspec.structs.replace(job, shards_done=0, bytes_done=0, failed={})
                self._begin(fresh, dataset.id, manifest)

    async def wait(self, job_id: str, version: int, timeout_s: float) -> StageJob:
        """The job as soon as it is newer than `version`, at its end, or after the time."""
        with anyio.move_on_after(timeout_s):
            while True:
                job = self._catalog.job(job_id)
                if job.version > version or job.state != "running":
                    return job
                await self._moved.setdefault(job_id, anyio.Event()).wait()
        return self._catalog.job(job_id)

    def _begin(self, job: StageJob, dataset_id: str, manifest: Manifest) -> None:
        self._tasks.start_soon(self._run, job, dataset_id, manifest)

    async def _run(self, job: StageJob, dataset_id: str, manifest: Manifest) -> None:
        owner = next(self._owners)
        shards = [manifest.shard(number) for number in range(len(manifest))]
        self._plans.set(owner, Plan(dataset_id, shards, window=0))
        self._scheduler.forgive()
        board = _Board(job)
        # As many demands as fetchers: the rest of the job waits in the plan, behind the loaders.
        turns = anyio.CapacityLimiter(8)
        try:
            async with anyio.create_task_group() as tasks:
                for shard in shards:
                    await turns.acquire_on_behalf_of(shard.id)
                    tasks.start_soon(self._one, shard, board, turns)
        finally:
            self._plans.drop(owner)
            self._scheduler.poke()
        self._note(board.finished())

    async def _one(self, shard: Shard, board: _Board, turns: anyio.CapacityLimiter) -> None:
        try:
            await self._scheduler.demand(shard, bulk=True)
            board.done(shard)
        except ForebayError as err:
            board.failed(shard, err)
        finally:
            turns.release_on_behalf_of(shard.id)
        self._note(board.job)

    def _note(self, job: StageJob) -> None:
        self._catalog.put_job(job)
        self._moved.pop(job.id, anyio.Event()).set()


class _Board:
    """The job's counts; they add up at any time."""

    def __init__(self, job: StageJob) -> None:
        self.job = job

    def done(self, shard: Shard) -> None:
        self.job = msgspec.structs.replace(
            self.job,
            shards_done=self.job.shards_done + 1,
            bytes_done=self.job.bytes_done + shard.size_bytes,
            version=self.job.version + 1,
        )

    def failed(self, shard: Shard, err: ForebayError) -> None:
        self.job = msgspec.structs.replace(
            self.job,
            failed={**self.job.failed, shard.info.key: str(err)},
            version=self.job.version + 1,
        )

    def finished(self) -> StageJob:
        """Done means every shard is there and verified; anything less is failed (F29)."""
        state = "failed" if self.job.failed else "done"
        return msgspec.structs.replace(self.job, state=state, version=self.job.version + 1)
