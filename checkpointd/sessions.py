"""Trainers' connections: arenas in, levels and verified files out."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from forebay.checkpointd import layout, restore
from forebay.checkpointd.arena import read_header
from forebay.checkpointd.attempts import Attempts
from forebay.checkpointd.pipeline import Pipeline
from forebay.checkpointd.spool import Spool
from forebay.core import metrics
from forebay.core.channel import Handler, Reply
from forebay.core.config import Settings
from forebay.core.errors import CheckpointCorrupt, NoCheckpoint, ProtocolError, WaitTimeout
from forebay.core.protocol import (
    Absorb,
    Absorbed,
    Checkpoints,
    CheckpointStatus,
    Done,
    GetMetrics,
    GetStatus,
    ListCheckpoints,
    Message,
    MetricsText,
    OpenCheckpoint,
    OpenFile,
    VerifyCheckpoints,
    WaitLevel,
)


class CheckpointSessions:
    """Requests hold no state between them, so one handler serves every connection."""

    def __init__(self, settings: Settings, attempts: Attempts, spool: Spool, pipeline: Pipeline) -> None:
        self._settings = settings
        self._attempts = attempts
        self._spool = spool
        self._pipeline = pipeline
        self._handlers: dict[type[Message], Callable[[Any], Awaitable[Reply]]] = {
            WaitLevel: self._wait_level,
            ListCheckpoints: self._list,
            OpenCheckpoint: self._open_checkpoint,
            OpenFile: self._open_file,
            VerifyCheckpoints: self._verify,
            GetStatus: self._get_status,
            GetMetrics: self._get_metrics,
        }

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[Handler]:
        yield self.handle

    async def handle(self, message: Message, fds: list[int]) -> Reply:
        if isinstance(message, Absorb):
            return self._absorb(message, fds)
        handler = self._handlers.get(type(message))
        if handler is None or fds:
            raise ProtocolError(f"checkpointd has no answer to {type(message).__name__}")
        return await handler(message)

    def _absorb(self, request: Absorb, fds: list[int]) -> Reply:
        """From here on the snapshot is this daemon's: the trainer may die (C2)."""
        if len(fds) != 1:
            raise ProtocolError(f"Absorb comes with one descriptor, not {len(fds)}")
        layout.folder(request.run, request.step, request.attempt)
        if not 0 <= request.rank < request.world_size:
            raise ProtocolError(f"rank {request.rank} is not below {request.world_size}")
        header = read_header(fds[0])
        if (header.generation, header.attempt) != (request.generation, request.attempt):
            raise CheckpointCorrupt(f"the arena holds attempt {header.attempt}, not {request.attempt}")
        attempt = self._attempts.add(request, header.size_bytes)
        self._pipeline.absorb(attempt, os.dup(fds[0]), request.generation)
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

    async def _open_checkpoint(self, request: OpenCheckpoint) -> Reply:
        upstream = self._pipeline.upstream(request.upstream)
        async with self._pipeline.reading:
            opened = await restore.open_checkpoint(
                self._spool, upstream, request.run, self._pipeline.download, request.step, request.attempt
            )
        return opened, ()

    async def _open_file(self, request: OpenFile) -> Reply:
        folder = layout.folder(request.run, request.step, request.attempt)
        path = self._spool.root / folder / layout.check_file(request.name)
        try:
            return Done(), [os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)]
        except FileNotFoundError as err:
            raise NoCheckpoint(f"{path} is not there", hint="open the checkpoint first") from err

    async def _verify(self, request: VerifyCheckpoints) -> Reply:
        upstream = self._pipeline.upstream(request.upstream)
        return Checkpoints(await restore.verify(self._spool, upstream, request.run, request.step)), ()

    async def _get_status(self, request: GetStatus) -> Reply:
        attempts = [attempt.status() for attempt in self._attempts.recent()]
        return CheckpointStatus(os.getpid(), socket.gethostname(), str(self._spool.root), attempts), ()

    async def _get_metrics(self, request: GetMetrics) -> Reply:
        return MetricsText(metrics.render(metrics.CHECKPOINT)), ()
