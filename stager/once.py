"""Requests that are done once, however often they are sent: the keys, and what was answered."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import anyio
import xxhash

from forebay.core.channel import Reply, close_all
from forebay.core.errors import KeyReused, ProtocolError
from forebay.core.journal import Journal
from forebay.core.protocol import AddPin, Message, Once, Register, RetryJob, Stage, decode, encode

_KEPT_S = 24 * 3600.0
# These never wait, so what they do and the note of it are one transaction.
_AT_ONCE = (Stage, AddPin, RetryJob)


class OnceBook:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._doing: dict[str, anyio.Lock] = {}

    async def once(self, once: Once, do: Callable[[Message], Awaitable[Reply]]) -> Reply:
        """What was answered to that key before, else what `do` answers now. A failure is not remembered.

        Raises KeyReused when the key stands for another request.
        """
        request = decode(once.request)
        if not isinstance(request, (*_AT_ONCE, Register)):
            raise ProtocolError(f"{type(request).__name__} cannot be asked for by key")
        lock = self._doing.setdefault(once.key, anyio.Lock())
        try:
            async with lock:
                return self._known(once) or await self._do(once, request, do)
        finally:
            if not lock.statistics().tasks_waiting:
                self._doing.pop(once.key, None)

    def _known(self, once: Once) -> Reply | None:
        row = self._journal.row("SELECT digest, reply FROM once WHERE key=?", once.key)
        if row is None:
            return None
        if row["digest"] != xxhash.xxh3_128_digest(once.request):
            raise KeyReused("this Idempotency-Key was sent before with another request")
        return decode(row["reply"]), ()

    async def _do(self, once: Once, request: Message, do: Callable[[Message], Awaitable[Reply]]) -> Reply:
        now = time.time()
        with self._journal.transact() if isinstance(request, _AT_ONCE) else nullcontext():
            reply, fds = await do(request)
            close_all(fds)
            self._journal.run("DELETE FROM once WHERE at < ?", now - _KEPT_S)
            self._journal.run(
                "INSERT INTO once VALUES (?,?,?,?)",
                once.key, xxhash.xxh3_128_digest(once.request), encode(reply), now,
            )  # fmt: skip
        return reply, ()
