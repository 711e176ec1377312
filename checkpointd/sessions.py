"""Trainers' connections: arenas in, levels and verified files out."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from forebay.checkpointd import layout, restore
from forebay.checkpointd.arena import DATA_OFFSET, read_header
from forebay.checkpointd.attempts import Attempts
from forebay.checkpointd.commit import find_commits
from forebay.checkpointd.memory import Memory
from forebay.checkpointd.pipeline import Pipeline
from forebay.checkpointd.retention import leaving, removable, remove, trim
from forebay.checkpointd.spool import Spool
from forebay.checkpointd.waves import Waves
from forebay.core import metrics, recent
from forebay.core.channel import Handler, Reply
from forebay.core.errors import CheckpointCorrupt, NoCheckpoint, ProtocolError, WaitTimeout
from forebay.core.failpoint import failpoint
from forebay.core.protocol import (
    Absorb,
    Absorbed,
    Checkpoints,
    CheckpointStatus,
    Done,
    Farewell,
    FileReady,
    Flush,
    Flushed,
    GetMetrics,
    GetStatus,
    ListCheckpoints,
    ListProblems,
    Message,
    MetricsText,
    OpenCheckpoint,
    OpenFile,
    PinCheckpoint,
    Problems,
    Prune,
    RemoveCheckpoint,
    RepairFile,
    VerifyCheckpoints,
    WaitLevel,
)
from forebay.tiers.landing import opened_again


class CheckpointSessions:
    """Requests hold no state between them, but for the memory that came by a connection."""

    def __init__(self, attempts: Attempts, spool: Spool, memory: Memory, pipeline: Pipeline) -> None:
        self._attempts = attempts
        self._spool = spool
        self._memory = memory
        self._pipeline = pipeline
        self._waves = Waves(spool)
        self._restorer = restore.Restorer(spool, memory, pipeline.partner, pipeline.download)
        self._numbers = itertools.count(1)
        self._handlers: dict[type[Message], Callable[[Any], Awaitable[Reply]]] = {
            WaitLevel: self._wait_level,
            ListCheckpoints: self._list,
            OpenFile: self._open_file,
            VerifyCheckpoints: self._verify,
            RepairFile: self._repair,
            Prune: self._prune,
            RemoveCheckpoint: self._remove,
            ListProblems: self._list_problems,
            PinCheckpoint: self._pin,
            Flush: self._flush,
            GetStatus: self._get_status,
            GetMetrics: self._get_metrics,
        }

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[Handler]:
        session = next(self._numbers)
        try:
            yield partial(self.handle, session)
        finally:
            self._memory.left(session)
            self._waves.left(session)
            self._pipeline.reading.left(session)

    async def handle(self, session: int, message: Message, fds: list[int]) -> Reply:
        if isinstance(message, Absorb):
            return await self._absorb(session, message, fds)
        if isinstance(message, Farewell):
            self._memory.left(session, on_purpose=True)
            return Done(), ()
        if isinstance(message, OpenCheckpoint) and not fds:
            return await self._open_checkpoint(session, message)
        handler = self._handlers.get(type(message))
        if handler is None or fds:
            raise ProtocolError(f"checkpointd has no answer to {type(message).__name__}")
        return await handler(message)

    async def _absorb(self, session: int, request: Absorb, fds: list[int]) -> Reply:
        """From here on the snapshot is this daemon's: the trainer may die (C2)."""
        if len(fds) != 1:
            raise ProtocolError(f"Absorb comes with one descriptor, not {len(fds)}")
        layout.folder(request.run, request.step, request.attempt)
        if not 0 <= request.rank < request.world_size:
            raise ProtocolError(f"rank {request.rank} is not below {request.world_size}")
        header = read_header(fds[0])
        if (header.generation, header.attempt) != (request.generation, request.attempt):
            raise CheckpointCorrupt(f"the arena holds attempt {header.attempt}, not {request.attempt}")
        if request.wave:
            written = await self._waves.add(session, request, request.wave, fds[0], header.size_bytes)
            if written:
                self._pipeline.written(self._attempts.add(request, request.wave.total_bytes), written)
        else:
            attempt = self._attempts.add(request, header.size_bytes)
            failpoint("absorb.noted")
            self._memory.keep(attempt, fds[0], request.generation, session)
            self._pipeline.absorb(attempt, os.dup(fds[0]), request.generation, request.about)
        metrics.checkpoint_absorbed_bytes.inc(header.size_bytes)
        return Absorbed(header.size_bytes), ()

    async def _wait_level(self, request: WaitLevel) -> Reply:
        found = await self._attempts.wait(
            request.run, request.attempt, request.rank, request.level, request.timeout_s
        )
        if found is None:
            now = self._attempts.get(request.run, request.attempt, request.rank)
            raise WaitTimeout(
                f"step {now.step} of {now.run} (rank {now.rank}) is {now.level}, "
                f"not yet {request.level}, after {request.timeout_s:g} s"
            )
        return found.status(), ()

    async def _list(self, request: ListCheckpoints) -> Reply:
        runs = [request.run] if request.run else sorted(p.name for p in self._spool.root.iterdir())
        upstream = self._pipeline.upstream(request.upstream)
        found = [c for run in runs for c in await restore.list_checkpoints(self._spool, upstream, run)]
        return Checkpoints(found), ()

    async def _open_checkpoint(self, session: int, request: OpenCheckpoint) -> Reply:
        upstream, reading = self._pipeline.upstream(request.upstream), self._pipeline.reading
        async with reading.lock:
            opened = await self._restorer.open(request, upstream)
            if not request.look:
                reading.hold(session, request.run, opened.checkpoint.step, opened.checkpoint.attempt)
        return opened, ()

    async def _open_file(self, request: OpenFile) -> Reply:
        rank = layout.rank_of(layout.check_file(request.name))
        if request.memory and rank is not None:
            fd = self._memory.find(request.run, request.attempt, rank)
            if fd is not None:
                return FileReady("memory", DATA_OFFSET), [opened_again(fd)]
        path = self._spool.path(request.run, request.step, request.attempt, request.name)
        try:
            return FileReady("spool", 0), [os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)]
        except FileNotFoundError as err:
            raise NoCheckpoint(f"{path} is not there", hint="open the checkpoint first") from err

    async def _repair(self, request: RepairFile) -> Reply:
        async with self._pipeline.reading.lock:
            await self._restorer.repair(request, self._pipeline.upstream(request.upstream))
        return Done(), ()

    async def _prune(self, request: Prune) -> Reply:
        store = self._pipeline.upstream(request.upstream)
        reading = self._pipeline.reading
        async with reading.lock:
            rule = leaving if request.dry_run else trim
            gone = await rule(store, request.run, request.keep, reading.of_run(request.run))
        return Checkpoints([restore.describe(request.run, at, store.url) for at in gone]), ()

    async def _remove(self, request: RemoveCheckpoint) -> Reply:
        store = self._pipeline.upstream(request.upstream)
        reading = self._pipeline.reading
        async with reading.lock:
            gone = await removable(store, request.run, request.step, reading.of_run(request.run))
            for at in gone if not request.dry_run else ():
                await remove(store, request.run, at)
        return Checkpoints([restore.describe(request.run, at, store.url) for at in gone]), ()

    async def _pin(self, request: PinCheckpoint) -> Reply:
        store = self._pipeline.upstream(request.upstream)
        for at in await find_commits(store, request.run):
            if at.step == request.step and not at.problem:
                key = f"{layout.folder(request.run, at.step, at.attempt)}/{layout.PIN}"
                await (store.put(key, b"{}\n") if request.pinned else store.delete(key))
                return Done(), ()
        raise NoCheckpoint(f"no valid checkpoint of {request.run} at step {request.step} in {store.url}")

    async def _flush(self, request: Flush) -> Reply:
        found = await self._pipeline.flush(request.level, request.deadline_s)
        return Flushed([attempt.status() for attempt in found]), ()

    async def _verify(self, request: VerifyCheckpoints) -> Reply:
        upstream = self._pipeline.upstream(request.upstream)
        return Checkpoints(await restore.verify(self._spool, upstream, request.run, request.step)), ()

    async def _get_status(self, request: GetStatus) -> Reply:
        attempts = [attempt.status() for attempt in self._attempts.recent()]
        return CheckpointStatus(os.getpid(), socket.gethostname(), str(self._spool.root), attempts), ()

    async def _list_problems(self, request: ListProblems) -> Reply:
        return Problems(recent.newest()), ()

    async def _get_metrics(self, request: GetMetrics) -> Reply:
        return MetricsText(metrics.render(metrics.CHECKPOINT)), ()
