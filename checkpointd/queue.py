"""Uploads in line: some at a time, in order of steps; in an emergency the newest first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from forebay.checkpointd.attempts import Attempt


class UploadQueue:
    """`newest_first` is what a flush sets: of what cannot all go up in time, the newest is worth most."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: list[tuple[Attempt, anyio.Event]] = []
        self.newest_first = False

    @asynccontextmanager
    async def turn(self, attempt: Attempt) -> AsyncIterator[None]:
        mine = (attempt, anyio.Event())
        self._waiting.append(mine)
        self._dispatch()
        try:
            await mine[1].wait()
            yield
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:
                self._free += 1
            self._dispatch()

    def _dispatch(self) -> None:
        while self._free and self._waiting:
            pick = max if self.newest_first else min
            chosen = pick(self._waiting, key=lambda item: (item[0].step, item[0].absorbed_at))
            self._waiting.remove(chosen)
            self._free -= 1
            chosen[1].set()
