"""Snapshots that still lie in memory after they were written: the nearest place to restore from.

An arena belongs to its trainer, which copies the next save but one into it. While the trainer lives
this costs nothing; when it dies, what it saved last is kept for the one that comes after it, for a
time. Whether an arena still holds a snapshot is read from its header, before and after.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from forebay.checkpointd.arena import holds
from forebay.checkpointd.attempts import Attempt

# Of one rank: as many as it has buffers.
_KEPT = 2


@dataclass(frozen=True)
class _Snapshot:
    attempt: str
    generation: int
    session: int
    fd: int

    @property
    def inode(self) -> int:
        return os.fstat(self.fd).st_ino


class Memory:
    """`keep_s`: how long snapshots outlive the connection they came by."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._kept: dict[tuple[str, int], list[_Snapshot]] = {}
        self._leaving: dict[int, float] = {}
        self._left = anyio.Event()

    def keep(self, attempt: Attempt, fd: int, generation: int, session: int) -> None:
        """The descriptor is duplicated. Snapshots of an earlier trainer of that rank are given back."""
        new = _Snapshot(attempt.attempt, generation, session, os.dup(fd))
        rank = (attempt.run, attempt.rank)
        self._drop(rank, lambda old: old.session != session or old.inode == new.inode)
        kept = self._kept.setdefault(rank, [])
        kept.append(new)
        for old in kept[:-_KEPT]:
            kept.remove(old)
            os.close(old.fd)

    def find(self, run: str, attempt: str, rank: int) -> int | None:
        """A descriptor that stays this object's, or None."""
        for snapshot in self._kept.get((run, rank), ()):
            if snapshot.attempt == attempt and holds(snapshot.fd, attempt, snapshot.generation):
                return snapshot.fd
        return None

    def forget(self, run: str, attempt: str, rank: int) -> None:
        """It turned out to be damaged."""
        self._drop((run, rank), lambda old: old.attempt == attempt)

    def left(self, session: int, *, on_purpose: bool = False) -> None:
        """A connection has ended; on purpose, when nobody will want to restore what it saved."""
        if on_purpose:
            self._drop_session(session)
        elif any(s.session == session for kept in self._kept.values() for s in kept):
            self._leaving[session] = time.monotonic() + self._keep_s
            self._left.set()

    async def run(self) -> None:
        """Gives back what nobody came for."""
        while True:
            self._left = anyio.Event()
            next_at = min(self._leaving.values(), default=math.inf)
            with anyio.move_on_after(max(0.0, next_at - time.monotonic())):
                await self._left.wait()
            for session, at in list(self._leaving.items()):
                if at <= time.monotonic():
                    self._drop_session(session)

    def _drop_session(self, session: int) -> None:
        self._leaving.pop(session, None)
        for rank in list(self._kept):
            self._drop(rank, lambda old: old.session == session)

    def _drop(self, rank: tuple[str, int], which: Callable[[_Snapshot], bool]) -> None:
        for old in [old for old in self._kept.get(rank, ()) if which(old)]:
            self._kept[rank].remove(old)
            os.close(old.fd)
        if not self._kept.get(rank):
            self._kept.pop(rank, None)
