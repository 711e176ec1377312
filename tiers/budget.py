"""One budget of bytes in flight for all fetches of a daemon: what bounds its memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio


class ByteBudget:
    """At most `limit_bytes` taken at once; a single larger request gets through alone."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self._freed = anyio.Condition()

    @asynccontextmanager
    async def take(self, size_bytes: int) -> AsyncIterator[None]:
        async with self._freed:
            while self.taken_bytes and self.taken_bytes + size_bytes > self.limit_bytes:
                await self._freed.wait()
            self.taken_bytes += size_bytes
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                async with self._freed:
                    self.taken_bytes -= size_bytes
                    self._freed.notify_all()
