"""From the trainer's tensors to checkpointd: one copy into an arena, then a descriptor."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import torch

from forebay.checkpointd.arena import DATA_OFFSET, Arena, check_memory
from forebay.checkpointd.container import Container, Slot
from forebay.checkpointd.device import page_lock, unlock
from forebay.core.channel import Channel, ask
from forebay.core.config import Settings
from forebay.core.errors import CheckpointError, DaemonUnavailable, NotFound, SaveFailed, WaitTimeout
from forebay.core.protocol import About, Absorb, Absorbed, AttemptStatus, Done, Farewell, Level, WaitLevel

log = logging.getLogger("forebay.checkpointd")

# Beyond the daemon's own limit, so that its error comes first.
_GRACE_S = 15.0
_BUSY = "the snapshots before it still wait for the disk"

OnError = Literal["raise", "warn"] | int


@dataclass(frozen=True)
class Target:
    """Whose snapshot of what."""

    run: str
    step: int
    attempt: str
    rank: int
    world_size: int
    upstream: str | None
    about: About = field(default_factory=About)


class SaveHandle:
    """A save that has been absorbed. The word `saved` is for those that waited.

    `skipped`: the policy left this one out; to wait for it is an error.
    """

    def __init__(self, settings: Settings, target: Target, *, skipped: bool = False) -> None:
        self._settings = settings
        self.target = target
        self.skipped = skipped

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

    def request(self, level: Level, timeout_s: float) -> WaitLevel:
        at = self.target
        return WaitLevel(at.run, at.attempt, at.rank, level, timeout_s)

    def _ask(self, level: Level, timeout_s: float) -> AttemptStatus:
        if self.skipped:
            raise SaveFailed(f"step {self.target.step} of {self.target.run} was skipped: {_BUSY}")
        request, socket = self.request(level, timeout_s), self._settings.checkpoint_socket
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
        self._locked = False
        self._shape: tuple[tuple[Slot, ...], int] | None = None
        self._places: list[tuple[str, torch.Tensor]] = []

    def fits(self, size_bytes: int) -> bool:
        return self.arena is not None and self.arena.capacity_bytes >= size_bytes

    def fill(self, container: Container, tensors: Mapping[str, torch.Tensor]) -> None:
        """Views into the arena are kept for as long as the file has the same shape."""
        assert self.bytes is not None
        shape = (container.slots, len(container.header))
        if self._shape is None or self._shape[0] is not shape[0] or self._shape[1] != shape[1]:
            self._shape, self._places = shape, container.places(self.bytes)
        container.fill(self.bytes, self._places, tensors)

    def fit(self, size_bytes: int) -> Arena:
        if self.arena is None or not self.fits(size_bytes):
            self.close()
            self.arena = Arena(size_bytes)
            self.bytes = torch.frombuffer(self.arena.map, dtype=torch.uint8, offset=DATA_OFFSET)
            self._locked = page_lock(self.bytes)
        return self.arena

    def close(self) -> None:
        if self._locked and self.bytes is not None:
            unlock(self.bytes)
        if self.arena:
            self.arena.close()
        self.arena, self.bytes, self._locked = None, None, False
        self._shape, self._places = None, []


def _fit_all(buffers: Sequence[_Buffer], size_bytes: int) -> None:
    for buffer in buffers:
        buffer.fit(size_bytes)


class Handover:
    """The arenas of one rank, used in turn: a save waits only for the one `buffers` before it."""

    def __init__(self, settings: Settings, buffers: int, on_error: OnError = "raise") -> None:
        self._settings = settings
        self._on_error = on_error
        self._strikes = 0
        self._buffers = [_Buffer() for _ in range(buffers)]
        self._next = 0
        self._background = ThreadPoolExecutor(1, "forebay-arena")
        self._preparing: Future[None] | None = None
        self._channel: Channel | None = None
        self.last: SaveHandle | None = None

    def prepare(self, size_bytes: int, *, wait: bool) -> None:
        """Allocate and touch all arenas, in the background; a save that comes first waits for it.

        Raises CheckpointError when the host lacks the memory.
        """
        self._prepared()
        small = [b for b in self._buffers if b.busy is None and not b.fits(size_bytes)]
        check_memory(size_bytes * len(small))
        self._preparing = self._background.submit(_fit_all, small, size_bytes)
        if wait:
            self._prepared()

    def _prepared(self) -> None:
        """The buffers are this thread's alone again."""
        if self._preparing:
            preparing, self._preparing = self._preparing, None
            try:
                preparing.result()
            except CheckpointError as err:
                ready = [buffer for buffer in self._buffers if buffer.arena]
                if not ready:
                    raise
                log.warning("going on with %d of %d buffers: %s", len(ready), len(self._buffers), err)
                self._buffers, self._next = ready, 0

    def send(self, target: Target, container: Container, tensors: Mapping[str, torch.Tensor]) -> SaveHandle:
        """Copy, hand over. Returns when checkpointd owns the snapshot (C1)."""
        self._prepared()
        size_bytes = container.size_bytes
        buffer = self._buffers[self._next]
        first = buffer.arena is None
        self._wait_free(buffer)
        self._next = (self._next + 1) % len(self._buffers)
        arena = buffer.fit(size_bytes)
        arena.begin(target.attempt, size_bytes)
        buffer.fill(container, tensors)
        generation = arena.finish(target.attempt, size_bytes)
        request = Absorb(
            target.run,
            target.step,
            target.attempt,
            target.rank,
            target.world_size,
            generation,
            target.upstream,
            target.about,
        )
        self._deliver(request, arena.fd)
        buffer.busy = self.last = SaveHandle(self._settings, target)
        if first:
            # The next save is not to pay for its buffer, while the trainer computes.
            others = [b for b in self._buffers if b.arena is None]
            self._preparing = self._background.submit(_fit_all, others, size_bytes)
        return self.last

    def free(self) -> bool:
        """The next save would not have to wait for the disk."""
        busy = self._buffers[self._next].busy
        if busy is None:
            return True
        status = self._status(busy)
        return status is None or status.level != "absorbed" or status.error is not None

    def refuse(self, target: Target, skip: bool) -> SaveHandle:
        """What becomes of a save that would have to wait. Raises SaveFailed unless it may be skipped."""
        if not skip:
            raise SaveFailed(f"step {target.step} of {target.run} was not saved: {_BUSY}")
        log.warning("step %d of %s is skipped: %s", target.step, target.run, _BUSY)
        return SaveHandle(self._settings, target, skipped=True)

    def report_failure(self) -> None:
        """The last save failed after it returned: said once, as `on_error` wants it (C6)."""
        if not self.last:
            return
        status = self._status(self.last)
        if status is None or not status.error:
            self._strikes = 0 if status and status.level == "committed" else self._strikes
            return
        self.last = None
        self._strikes += 1
        error = _failed(status)
        if self._on_error == "warn" or (isinstance(self._on_error, int) and self._strikes < self._on_error):
            log.error("%s", error)
            return
        raise error

    def close(self) -> None:
        if self._channel:
            # Its memory is given back at once; without a word it would wait for a successor.
            with suppress(DaemonUnavailable, WaitTimeout):
                self._channel.request(Farewell(), expect=Done)
            self._channel.close()
        self._background.shutdown()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def _wait_free(self, buffer: _Buffer) -> None:
        """The daemon has written what is in this arena; a failed one is free too."""
        if buffer.busy:
            busy, buffer.busy = buffer.busy, None
            if self._status(busy):
                busy._ask("local", self._settings.checkpoint.wait_s)

    def _status(self, handle: SaveHandle) -> AttemptStatus | None:
        """None when the daemon is away: what it had is then in its journal, or lost and reported later."""
        if self._channel:
            # No new connection for each save; a daemon that was restarted is asked on a new one.
            with suppress(NotFound, DaemonUnavailable):
                return self._channel.request(handle.request("absorbed", 0.0), expect=AttemptStatus)[0]
        with suppress(DaemonUnavailable):
            return handle.status()
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
