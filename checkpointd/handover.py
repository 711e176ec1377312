"""From the trainer's tensors to checkpointd: one copy into an arena, then a descriptor."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import PAGESIZE
from typing import Literal

import torch

from forebay.checkpointd.arena import Arena, check_memory
from forebay.checkpointd.buffers import Buffer, fit_all
from forebay.checkpointd.container import Container
from forebay.core.channel import Channel, ask
from forebay.core.config import Settings
from forebay.core.errors import (
    CheckpointError,
    DaemonUnavailable,
    ForebayError,
    NotFound,
    SaveFailed,
    WaitTimeout,
)
from forebay.core.protocol import (
    About,
    Absorb,
    Absorbed,
    AttemptStatus,
    Done,
    Farewell,
    Level,
    WaitLevel,
    Wave,
)

log = logging.getLogger("forebay.checkpointd")

# Beyond the daemon's own limit, so that its error comes first.
_GRACE_S = 15.0
_ANSWER_S = 30.0
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

    def request(self, generation: int, wave: Wave | None = None) -> Absorb:
        return Absorb(
            self.run, self.step, self.attempt, self.rank, self.world_size,
            generation, self.upstream, self.about, wave,
        )  # fmt: skip


class SaveHandle:
    """A save that has been absorbed. The word `saved` is for those that waited.

    `skipped`: the policy left this one out; to wait for it is an error.
    """

    def __init__(self, settings: Settings, target: Target, *, skipped: bool = False) -> None:
        self._settings = settings
        self.target = target
        self.skipped = skipped
        self.leaving: Future[None] | None = None

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
        if self.leaving:
            self.leaving.result()
        request, socket = self.request(level, timeout_s), self._settings.checkpoint_socket
        try:
            return ask(socket, request, expect=AttemptStatus, role="trainer", timeout_s=timeout_s + _GRACE_S)
        except NotFound as err:
            raise SaveFailed(f"{err.message}: its journal was lost, and the save with it") from err


class Handover:
    """The arenas of one rank, used in turn: a save waits only for the one `buffers` before it."""

    def __init__(
        self, settings: Settings, buffers: int, on_error: OnError = "raise", *, overlap: bool = False
    ) -> None:
        self._settings = settings
        self._on_error = on_error
        self._overlap = overlap
        self._leaving: Future[None] | None = None
        self._strikes = 0
        self._warned = False
        self._buffers = [Buffer() for _ in range(buffers)]
        self._next = 0
        # In whole pages: so the parts of a file lie at whole pages too.
        self._arena_bytes = (settings.checkpoint.arena_bytes or sys.maxsize) // PAGESIZE * PAGESIZE
        self._background = ThreadPoolExecutor(1, "forebay-arena")
        self._preparing: Future[None] | None = None
        self._channel: Channel | None = None
        self.last: SaveHandle | None = None

    def prepare(self, size_bytes: int, *, wait: bool) -> None:
        """Allocate and touch all arenas, in the background; a save that comes first waits for it.

        Raises CheckpointError when the host lacks the memory.
        """
        self.left()
        self._prepared()
        size_bytes = min(size_bytes, self._arena_bytes)
        small = [b for b in self._buffers if b.busy is None and not b.fits(size_bytes)]
        check_memory(size_bytes * len(small))
        self._preparing = self._background.submit(fit_all, small, size_bytes)
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
        self.left()
        self._prepared()
        size_bytes = container.size_bytes
        if size_bytes > self._arena_bytes:
            # When it returns all is on the disk: the last part's memory is then free as well (F12).
            self._once_more(lambda: self._waves(target, container, tensors))
            self.last = SaveHandle(self._settings, target)
            return self.last
        first = self._buffers[self._next].arena is None
        buffer, arena = self._next_buffer(size_bytes)
        arena.begin(target.attempt, size_bytes)
        copies = buffer.fill(container, tensors)

        def hand_over() -> None:
            copies.finish()
            request = target.request(arena.finish(target.attempt, size_bytes))
            self._once_more(lambda: self._absorb(request, arena.fd))
            buffer.busy = handle

        handle = SaveHandle(self._settings, target)
        if self._overlap:
            self._leaving = handle.leaving = self._background.submit(hand_over)
        else:
            hand_over()
        self.last = handle
        if first:
            # The next save is not to pay for its buffer, while the trainer computes.
            others = [b for b in self._buffers if b.arena is None]
            self._preparing = self._background.submit(fit_all, others, size_bytes)
        return self.last

    def left(self) -> None:
        """The last snapshot is checkpointd's. Raises what went wrong on its way there."""
        if self._leaving:
            leaving, self._leaving = self._leaving, None
            try:
                leaving.result()
            except ForebayError:
                # Said now, and no more.
                self.last = None
                raise

    def _next_buffer(self, size_bytes: int) -> tuple[Buffer, Arena]:
        """Free, and large enough."""
        buffer = self._buffers[self._next]
        self._wait_free(buffer)
        self._next = (self._next + 1) % len(self._buffers)
        return buffer, buffer.fit(size_bytes)

    def _waves(self, target: Target, container: Container, tensors: Mapping[str, torch.Tensor]) -> None:
        """One part is copied while the one before it is written, if there are two buffers."""
        writing: Future[None] | None = None
        try:
            for offset in range(0, container.size_bytes, self._arena_bytes):
                size_bytes = min(self._arena_bytes, container.size_bytes - offset)
                if writing and len(self._buffers) == 1:
                    writing.result()
                buffer, arena = self._next_buffer(self._arena_bytes)
                arena.begin(target.attempt, size_bytes)
                buffer.fill_part(container, tensors, offset, size_bytes)
                request = target.request(
                    arena.finish(target.attempt, size_bytes), Wave(offset, container.size_bytes)
                )
                if writing:
                    writing.result()
                writing = self._background.submit(self._absorb, request, arena.fd)
        finally:
            # The connection is this thread's alone again, whatever happened.
            if writing:
                writing.result()

    def free(self) -> bool:
        """The next save would not have to wait for the disk."""
        self.left()
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
        """The last save failed after it returned: said once, as `on_error` wants it (C6).

        That it saved the same tensors as the one before is said too (F35).
        """
        self.left()
        if not self.last:
            return
        status = self._status(self.last)
        if status is None:
            return
        self._warn_of_sameness(status)
        if not status.error:
            self._strikes = 0 if status.level == "committed" else self._strikes
            return
        self.last = None
        self._strikes += 1
        error = _failed(status)
        if self._on_error == "warn" or (isinstance(self._on_error, int) and self._strikes < self._on_error):
            log.error("%s", error)
            return
        raise error

    def _warn_of_sameness(self, status: AttemptStatus) -> None:
        if status.same_as is not None and not self._warned:
            self._warned = True
            log.warning(
                "%s: the tensors of step %d seem to be those of step %d; was the state dict made anew "
                "for this save? (said once)",
                status.run, status.step, status.same_as,
            )  # fmt: skip

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

    def _wait_free(self, buffer: Buffer) -> None:
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

    def _once_more(self, send: Callable[[], None]) -> None:
        """A connection is kept; a daemon that was restarted gets one more try on a new one."""
        try:
            send()
        except DaemonUnavailable as err:
            if self._channel is None:
                raise
            log.warning("checkpointd went away, connecting again: %s", err)
            self._channel = None
            send()

    def _absorb(self, request: Absorb, fd: int) -> None:
        # The answer to a wave comes when the disk has it.
        timeout_s = self._settings.checkpoint.wait_s if request.wave else _ANSWER_S
        if self._channel is None:
            self._channel = Channel.connect(self._settings.checkpoint_socket, "trainer")
        self._channel.request(request, expect=Absorbed, fds=[fd], timeout_s=timeout_s)


def _failed(status: AttemptStatus) -> SaveFailed:
    return SaveFailed(
        f"the checkpoint of {status.run} at step {status.step} (rank {status.rank}) "
        f"reached `{status.level}` and no further: {status.error}"
    )
