"""The trainer's way to a checkpoint: which one all ranks take, and this rank's bytes of it (C4)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import TypeAlias, TypeVar

from forebay.checkpointd.agree import Ranks
from forebay.checkpointd.layout import rank_file
from forebay.checkpointd.load import Into, Loaded, load
from forebay.core.channel import Channel
from forebay.core.config import Settings
from forebay.core.errors import CheckpointCorrupt, DigestMismatch, ForebayError, InvalidRequest, NoCheckpoint
from forebay.core.protocol import (
    Checkpoint,
    CheckpointFile,
    CheckpointOpened,
    Checkpoints,
    Done,
    Failure,
    FileReady,
    ListCheckpoints,
    OpenCheckpoint,
    OpenFile,
    RepairFile,
)

# What fails here must not leave the other ranks waiting: so it is called where errors are gathered.
Connect: TypeAlias = Callable[[], Channel]
T = TypeVar("T")
# A rank's part of one checkpoint.
Take: TypeAlias = Callable[[Checkpoint], T]

log = logging.getLogger("forebay.checkpointd")

# To bring a large checkpoint from upstream takes its time; the daemon's own limits are nearer.
READ_S = 3600.0
# Memory, the spool, upstream: each can turn out to be damaged once.
_TRIES = 3


class Reader:
    """Checkpoints of one run, through the checkpointd of this node."""

    def __init__(self, settings: Settings, run: str, upstream: str | None, ranks: Ranks) -> None:
        self._settings = settings
        self._ranks = ranks
        self.run = run
        self.upstream = upstream

    def latest(self) -> Checkpoint | None:
        with self.connect() as channel:
            request = ListCheckpoints(self.run, self.upstream)
            listed, _ = channel.request(request, expect=Checkpoints, timeout_s=READ_S)
        return next((c for c in listed.checkpoints if c.problem is None), None)

    def preview(self, step: int | None) -> CheckpointOpened:
        """What `restore` would take, and from where on this node. Raises NoCheckpoint."""
        with self.connect() as channel:
            request = OpenCheckpoint(self.run, self.upstream, step, look=True)
            return channel.request(request, expect=CheckpointOpened, timeout_s=READ_S)[0]

    def restore(self, step: int | None, rank: int, into: Into) -> tuple[CheckpointOpened, Loaded]:
        """The newest checkpoint of which every rank gets its part whole; all ranks take the same.

        Raises NoCheckpoint.
        """
        name = rank_file(rank)
        with ExitStack() as opened:

            @cache
            def channel() -> Channel:
                """One for all: what was chosen by it is held, and retention leaves it alone (C5)."""
                return opened.enter_context(self.connect())

            def take(at: Checkpoint) -> tuple[CheckpointOpened, Loaded]:
                return self._take(channel(), at, name, into)

            return self.agreed(channel, step, [name], {}, take)

    def agreed(
        self, channel: Connect, step: int | None, names: Sequence[str], bad: dict[str, str], take: Take[T]
    ) -> T:
        """What `take` returns for the newest checkpoint that every rank can take, the same on all (C4).

        `names`: files of which the first rank knows that it wants them. `bad`: attempts that are passed
        over, with the reason; those that turn out to be so are added. Raises NoCheckpoint.
        """
        while True:
            at = self._choice(channel, step, names, bad)
            error = None
            try:
                found = take(at)
            except ForebayError as err:
                error = err
            said = self._ranks.gather(
                error and (f"rank {self._ranks.rank}: {error}", self._for_the_caller(error))
            )
            problems = "; ".join(problem for problem, _ in filter(None, said))
            if not problems:
                return found
            if any(fatal for _, fatal in filter(None, said)):
                raise error or InvalidRequest(problems)
            bad[at.attempt] = problems
            log.warning("step %d passed over: %s", at.step, problems)

    def _for_the_caller(self, err: ForebayError) -> bool:
        """No other checkpoint would do better."""
        return isinstance(err, InvalidRequest) or (isinstance(err, NoCheckpoint) and not self._ranks.several)

    def _choice(
        self, channel: Connect, step: int | None, names: Sequence[str], bad: dict[str, str]
    ) -> Checkpoint:
        """What the first rank finds; its error is everybody's."""
        first = self._first(channel, step, names, bad) if self._ranks.rank == 0 else None
        choice: Checkpoint | Failure = self._ranks.broadcast(first)
        if isinstance(choice, Failure):
            raise choice.error()
        return choice

    def _first(
        self, channel: Connect, step: int | None, names: Sequence[str], bad: dict[str, str]
    ) -> Checkpoint | Failure:
        try:
            request = OpenCheckpoint(self.run, self.upstream, step, None, list(names), bad)
            opened, _ = channel().request(request, expect=CheckpointOpened, timeout_s=READ_S)
        except ForebayError as err:
            return Failure.of(err)
        for reason in opened.skipped:
            log.warning("passed over: %s", reason)
        return opened.checkpoint

    def _take(
        self, channel: Channel, at: Checkpoint, name: str, into: Into
    ) -> tuple[CheckpointOpened, Loaded]:
        request = OpenCheckpoint(self.run, self.upstream, at.step, at.attempt, [name])
        opened, _ = channel.request(request, expect=CheckpointOpened, timeout_s=READ_S)
        return opened, self._load(channel, opened, name, into)

    def _load(self, channel: Channel, opened: CheckpointOpened, name: str, into: Into) -> Loaded:
        at = opened.checkpoint
        file = next((file for file in opened.files if file.name == name), None)
        if file is None:
            raise NoCheckpoint(
                f"{self.run} at step {at.step} was saved by {at.world_size} ranks, there is no {name}",
                hint="restore(rank=0) reads another rank's state; "
                "torch.distributed.checkpoint with ForebayReader reshards",
            )
        memory = True
        for _ in range(_TRIES):
            request = OpenFile(self.run, at.step, at.attempt, name, memory)
            ready, (fd,) = channel.request(request, expect=FileReady, timeout_s=READ_S)
            try:
                return load(fd, ready.offset, file, into)
            except (DigestMismatch, CheckpointCorrupt, OSError) as err:
                log.warning("%s from %s: %s", name, ready.tier, err)
                memory = ready.tier != "memory"
                self._repair(channel, at, file, ready.tier)
            finally:
                os.close(fd)
        raise CheckpointCorrupt(f"{name} was repaired {_TRIES} times and read damaged each time")

    def _repair(self, channel: Channel, at: Checkpoint, file: CheckpointFile, tier: str) -> None:
        request = RepairFile(self.run, self.upstream, at.step, at.attempt, file.name, tier)
        channel.request(request, expect=Done, timeout_s=READ_S)

    def connect(self) -> Channel:
        return Channel.connect(self._settings.checkpoint_socket, "trainer")
