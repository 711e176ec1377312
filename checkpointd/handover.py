"""From the trainer's tensors to checkpointd: one copy into an arena, then a descriptor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from forebay.checkpointd.arena import DATA_OFFSET, Arena
from forebay.core.channel import Channel, ask
from forebay.core.config import Settings
from forebay.core.errors import DaemonUnavailable, NotFound, SaveFailed
from forebay.core.protocol import Absorb, Absorbed, AttemptStatus, Level, WaitLevel

log = logging.getLogger("forebay.checkpointd")

# Beyond the daemon's own limit, so that its error comes first.
_GRACE_S = 15.0


@dataclass(frozen=True)
class Target:
    """Whose snapshot of what."""

    run: str
    step: int
    attempt: str
    rank: int
    world_size: int
    upstream: str | None


class SaveHandle:
    """A save that has been absorbed. The word `saved` is for those that waited."""

    def __init__(self, settings: Settings, target: Target) -> None:
        self._settings = settings
        self.target = target

    def status(self) -> AttemptStatus:
        """How far it is, now."""
        return self._ask("absorbed", 0.0)

    def wait(self, level: Level = "committed", timeout_s: float | None = None) -> AttemptStatus:
        """Until that level is reached.

        Raises SaveFailed with the level that was reached, WaitTimeout after `timeout_s` (default:
        checkpoint.wait_s).
        """
        status = self._ask(level, self._settings.checkpoint.wait_s if timeout_s is None else timeout_s)
        if status.error:
            raise _failed(status)
        return status

    def _ask(self, level: Level, timeout_s: float) -> AttemptStatus:
        request = WaitLevel(self.target.run, self.target.attempt, self.target.rank, level, timeout_s)
        socket = self._settings.checkpoint_socket
        try:
            return ask(socket, request, expect=AttemptStatus, role="trainer", timeout_s=timeout_s + _GRACE_S)
        except NotFound as err:
            raise SaveFailed(f"{err.message}: its journal was lost, and the save with it") from err


class _Buffer:
    """An arena and the save that occupies it."""

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self.bytes: torch.Tensor | None = None
        self.busy: SaveHandle | None = None

    def fit(self, size_bytes: int) -> tuple[Arena, torch.Tensor]:
        if self.arena is None or self.bytes is None or self.arena.capacity_bytes < size_bytes:
            if self.arena:
                self.arena.close()
            self.arena = Arena(size_bytes)
            self.bytes = torch.frombuffer(self.arena.map, dtype=torch.uint8, offset=DATA_OFFSET)
        return self.arena, self.bytes


class Handover:
    """The arenas of one rank, used in turn: a save waits only for the one `buffers` before it."""

    def __init__(self, settings: Settings, buffers: int) -> None:
        self._settings = settings
        self._buffers = [_Buffer() for _ in range(buffers)]
        self._next = 0
        self._channel: Channel | None = None
        self.last: SaveHandle | None = None

    def prepare(self, size_bytes: int) -> None:
        """Allocate and touch all arenas now, so that the first save costs what later ones cost."""
        for buffer in self._buffers:
            if buffer.busy is None:
                buffer.fit(size_bytes)

    def send(self, target: Target, size_bytes: int, fill: Callable[[torch.Tensor], None]) -> SaveHandle:
        """Copy by `fill`, hand over. Returns when checkpointd owns the snapshot (C1).

        Raises SaveFailed for the first earlier save that failed and has not been reported (C6).
        """
        self.report_failure()
        buffer = self._buffers[self._next]
        self._wait_free(buffer)
        self._next = (self._next + 1) % len(self._buffers)
        arena, view = buffer.fit(size_bytes)
        arena.begin(target.attempt, size_bytes)
        fill(view)
        generation = arena.finish(target.attempt, size_bytes)
        request = Absorb(
            target.run,
            target.step,
            target.attempt,
            target.rank,
            target.world_size,
            generation,
            target.upstream,
        )
        self._deliver(request, arena.fd)
        buffer.busy = self.last = SaveHandle(self._settings, target)
        return self.last

    def report_failure(self) -> None:
        if self.last and (status := self._status(self.last)) and status.error:
            self.last = None
            raise _failed(status)

    def close(self) -> None:
        if self._channel:
            self._channel.close()
        for buffer in self._buffers:
            if buffer.arena:
                buffer.arena.close()
        self._buffers = []

    def _wait_free(self, buffer: _Buffer) -> None:
        """The daemon has written what is in this arena; a failed one is free too."""
        if buffer.busy:
            busy, buffer.busy = buffer.busy, None
            if self._status(busy):
                busy._ask("local", self._settings.checkpoint.wait_s)

    def _status(self, handle: SaveHandle) -> AttemptStatus | None:
        """None when the daemon is away: what it had is then in its journal, or lost and reported later."""
        try:
            return handle.status()
        except DaemonUnavailable:
            return None

    def _deliver(self, request: Absorb, fd: int) -> None:
        """A connection is kept; a daemon that was restarted gets one more try on a new one."""
        if self._channel:
            try:
                self._channel.request(request, expect=Absorbed, fds=[fd])
                return
            except DaemonUnavailable as err:
                log.warning("checkpointd went away, connecting again: %s", err)
        self._channel = Channel.connect(self._settings.checkpoint_socket, "trainer")
        self._channel.request(request, expect=Absorbed, fds=[fd])


def _failed(status: AttemptStatus) -> SaveFailed:
    return SaveFailed(
        f"the checkpoint of {status.run} at step {status.step} (rank {status.rank}) "
        f"reached `{status.level}` and no further: {status.error}"
    )
