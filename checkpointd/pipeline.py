"""An attempt's way: absorbed -> local -> durable -> committed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio import to_thread
from anyio.abc import TaskGroup

from forebay.checkpointd import layout
from forebay.checkpointd.attempts import Attempt, Attempts
from forebay.checkpointd.commit import missing_ranks, try_commit
from forebay.checkpointd.layout import Commit
from forebay.checkpointd.partner import Partner
from forebay.checkpointd.queue import UploadQueue
from forebay.checkpointd.reading import Reading
from forebay.checkpointd.recipes import Candidate
from forebay.checkpointd.retention import trim, trim_spool
from forebay.checkpointd.spool import Spool, Written
from forebay.checkpointd.uplink import Uplink
from forebay.checkpointd.upload import upload
from forebay.core import metrics
from forebay.core.config import Settings
from forebay.core.errors import CheckpointError, ForebayError
from forebay.core.failpoint import failpoint
from forebay.core.protocol import About, Level
from forebay.tiers.budget import Class, Gate, Ticket
from forebay.tiers.filesystem import os_error
from forebay.tiers.flow import Flow
from forebay.tiers.landing import Fetched, FileLanding
from forebay.tiers.store import ObjectInfo, Store, open_store
from forebay.tiers.transfer import Transfers, retrying

log = structlog.get_logger()

# Ranks on other nodes say nothing to this daemon: upstream is looked at this often for them.
_LOOK_AGAIN_S = 2.0
_UPLOADS_AT_ONCE = 4
# Longer than any upload is tried (checkpoint.upload_timeout_s), by far.
_ABANDONED_S = 86_400.0


class Pipeline:
    """One task per attempt; all belong to the daemon's task group."""

    def __init__(self, settings: Settings, attempts: Attempts, spool: Spool, tasks: TaskGroup) -> None:
        self._settings = settings
        self._attempts = attempts
        self._spool = spool
        self._tasks = tasks
        self._stores: dict[str, Store] = {}
        self._flows: dict[str, Flow] = {}
        self._uplink = Uplink(settings)
        gate = Gate(settings.transfer.inflight_bytes)
        self._transfers = Transfers(settings.transfer, gate, self._uplink.restore)
        self._disk = anyio.CapacityLimiter(2)
        self._queue = UploadQueue(_UPLOADS_AT_ONCE)
        self._stopping = False
        place = settings.checkpoint.partner
        self.partner = Partner(open_store(place, settings), spool, settings.checkpoint) if place else None
        self.reading = Reading()

    def upstream(self, url: str | None) -> Store:
        """Where a checkpoint becomes durable; the spool itself when there is no other place."""
        if url is None:
            return self._spool.store
        if url not in self._stores:
            self._stores[url] = open_store(url, self._settings)
        return self._stores[url]

    async def download(self, store: Store, info: ObjectInfo, path: Path, digest: str) -> Fetched:
        """A file of a checkpoint into the spool, verified. Raises what `Transfers.fetch` raises."""
        if store.url not in self._flows:
            self._flows[store.url] = Flow(store.url, self._settings.source_of(store.url).concurrency)
        return await self._transfers.fetch(
            store, self._flows[store.url], info, lambda: FileLanding(path), Ticket(Class.RESTORE), digest
        )

    def absorb(self, attempt: Attempt, arena_fd: int, generation: int, about: About) -> None:
        """Takes over the descriptor."""
        self._tasks.start_soon(self._from_memory, attempt, arena_fd, generation, about)

    def written(self, attempt: Attempt, written: Written) -> None:
        """What came in waves is on the disk already."""
        self._tasks.start_soon(self._from_disk, self._local(attempt, written))

    def take(self, attempt: Attempt, found: Candidate) -> None:
        """What a watched folder holds."""
        self._tasks.start_soon(self._from_folder, attempt, found)

    def resume(self) -> None:
        """What reached the disk before the daemon died goes on from there."""
        for attempt in self._attempts.open():
            log.info("resuming", run=attempt.run, step=attempt.step, rank=attempt.rank, level=attempt.level)
            self._tasks.start_soon(self._from_disk, attempt)

    async def flush(self, level: Level, deadline_s: float) -> list[Attempt]:
        """Bring what is open up to `level`, the newest first; how far it is when the time is over."""
        wanted = self._attempts.open()
        self._queue.newest_first = True
        try:
            with anyio.move_on_after(deadline_s):
                async with anyio.create_task_group() as tasks:
                    for at in wanted:
                        tasks.start_soon(self._attempts.wait, at.run, at.attempt, at.rank, level, deadline_s)
        finally:
            self._queue.newest_first = self._stopping
        return [self._attempts.get(at.run, at.attempt, at.rank) for at in wanted]

    async def drain(self) -> None:
        """The daemon is to end: what is only in memory goes to the disk first (C2)."""
        policy = self._settings.checkpoint
        self._stopping = True
        left = [at for at in await self.flush(policy.drain_to, policy.drain_s) if at.open]
        for at in left:
            log.warning("left open", run=at.run, step=at.step, rank=at.rank, level=at.level)

    async def _from_memory(self, attempt: Attempt, arena_fd: int, generation: int, about: About) -> None:
        with self._ends(attempt):
            try:
                async with self._disk:
                    write = partial(self._spool.write, attempt, arena_fd, generation, about)
                    written = await to_thread.run_sync(write)
            finally:
                os.close(arena_fd)
            await self._onward(self._local(attempt, written))

    async def _from_folder(self, attempt: Attempt, found: Candidate) -> None:
        with self._ends(attempt):
            take = partial(self._spool.take, attempt, found.root, found.names, copy=found.in_place)
            async with self._disk:
                await to_thread.run_sync(take)
            await self._onward(self._attempts.reached(attempt, "local"))

    async def _from_disk(self, attempt: Attempt) -> None:
        with self._ends(attempt):
            await self._onward(attempt)

    async def _onward(self, attempt: Attempt) -> None:
        store = self.upstream(attempt.upstream)
        wanted = attempt.level == "local" and attempt.upstream is not None
        if self.partner and wanted and await self.partner.replicate(attempt, self._uplink.drain):
            attempt = self._attempts.reached(attempt, "replicated")
        if attempt.level in ("local", "replicated"):
            if attempt.upstream is not None:
                folder, policy = self._spool.folder(attempt), self._settings.checkpoint
                async with self._queue.turn(attempt):
                    await upload(store, attempt, folder, policy, self._uplink.drain)
            attempt = self._attempts.reached(attempt, "durable")
        await self._commit(store, attempt)

    def _local(self, attempt: Attempt, written: Written) -> Attempt:
        found = self._attempts.local(attempt, written.digest, written.sample)
        if found.same_as is not None:
            log.warning("same tensors again", run=found.run, step=found.step, before=found.same_as)
            metrics.checkpoint_unchanged.inc()
        return found

    @contextmanager
    def _ends(self, attempt: Attempt) -> Iterator[None]:
        """What goes wrong ends this attempt, by name, and nothing else (C6)."""
        try:
            yield
        except ForebayError as err:
            self._fail(attempt, err)
        except OSError as err:
            self._fail(attempt, os_error(err, self._spool.folder(attempt)))
        except Exception as err:
            log.exception("checkpoint failed", run=attempt.run, step=attempt.step, rank=attempt.rank)
            self._fail(attempt, CheckpointError(f"an error of ours: {err!r}", hint="please report it"))

    async def _commit(self, store: Store, attempt: Attempt) -> None:
        """Until all ranks are there; a rank that never comes ends the wait."""
        with anyio.move_on_after(self._settings.checkpoint.upload_timeout_s):
            while self._attempts.get(attempt.run, attempt.attempt, attempt.rank).open:
                commit = await retrying(
                    lambda: try_commit(store, attempt.run, attempt.step, attempt.attempt, attempt.world_size),
                    self._settings.transfer.attempts,
                )
                if commit:
                    failpoint("commit.put")
                    await to_thread.run_sync(self._spool.write_commit, commit)
                    failpoint("commit.local")
                    self._attempts.reached(attempt, "committed")
                    metrics.checkpoint_committed.inc()
                    log.info("committed", run=attempt.run, step=attempt.step, rank=attempt.rank)
                    await self._trim(store, attempt, commit)
                    return
                await self._attempts.changed(_LOOK_AGAIN_S)
            return
        absent = await missing_ranks(store, attempt.run, attempt.step, attempt.attempt, attempt.world_size)
        self._attempts.failed(attempt, f"not committed: rank(s) {absent} never became durable")

    async def _trim(self, store: Store, attempt: Attempt, commit: Commit) -> None:
        """A commit stands, whatever becomes of the older ones."""
        if self.partner:
            await self.partner.committed(commit)
        async with self.reading.lock:
            try:
                read, keep = self.reading.of_run(attempt.run), self._settings.checkpoint.keep_local
                await trim_spool(self._spool, self._attempts, attempt.run, keep, read)
                if attempt.rank == 0 and attempt.upstream is not None:
                    await trim(store, attempt.run, commit.about.keep, read)
                    await store.abort_abandoned(f"{attempt.run}/", _ABANDONED_S, layout.is_our_key)
            except (ForebayError, OSError) as err:
                log.warning("retention failed", run=attempt.run, error=str(err))
                metrics.checkpoint_errors.labels("retention").inc()

    def _fail(self, attempt: Attempt, err: ForebayError) -> None:
        log.error("checkpoint failed", run=attempt.run, step=attempt.step, rank=attempt.rank, error=str(err))
        metrics.checkpoint_errors.labels(err.code).inc()
        self._attempts.failed(attempt, str(err))
