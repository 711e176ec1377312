"""Progress of stage jobs as server-sent events (HTML Living Standard, 9.2).

The id of an event is the job's version, so whoever comes back with `Last-Event-ID` misses nothing that still
matters. A daemon that is restarted meanwhile is waited for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import anyio
import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent

from forebay.api.auth.principal import Principal
from forebay.api.rest.daemons import Daemons
from forebay.api.rest.problems import details
from forebay.core.errors import DaemonUnavailable, ForebayError, TooBusy
from forebay.core.protocol import StageJob

_WAIT_S = 10.0
_PING_S = 15
# A reader that takes nothing for so long is let go.
_SEND_S = 30.0
_AWAY_S = 60.0
_AGAIN_S = 0.25


class Streams:
    """All that are open; they end before the service does."""

    RESPONSES: ClassVar[dict[int | str, dict[str, Any]]] = {
        200: {
            "description": "Events `progress`, at last `end`, with the job; `problem` when it cannot go on",
            "content": {"text/event-stream": {"schema": {}}},
        }
    }

    def __init__(self, most: int) -> None:
        self._most = most
        self._waits: set[anyio.CancelScope] = set()
        self._open = 0
        self._closing = False

    def close(self) -> None:
        self._closing = True
        for scope in self._waits:
            scope.cancel()

    def follow(
        self, daemons: Daemons, who: Principal, job: StageJob, last: int | None
    ) -> EventSourceResponse:
        """Raises TooBusy."""
        if self._open >= self._most:
            raise TooBusy(
                f"{self._open} streams are open already", hint="ask with `after` and `wait_s` instead"
            )
        events = self._events(daemons, who, job, last)
        return EventSourceResponse(events, ping=_PING_S, send_timeout=_SEND_S)

    async def _events(
        self, daemons: Daemons, who: Principal, job: StageJob, last: int | None
    ) -> AsyncIterator[ServerSentEvent]:
        self._open += 1
        try:
            if job.version != last:
                yield _event("progress", job)
            while job.state == "running":
                moved = await self._next(daemons, who, job)
                if moved is None:
                    return
                if moved.version != job.version:
                    yield _event("progress", moved)
                job = moved
            yield _event("end", job)
        except ForebayError as err:
            yield ServerSentEvent(event="problem", data=msgspec.json.encode(details(err)).decode())
        finally:
            self._open -= 1

    async def _next(self, daemons: Daemons, who: Principal, job: StageJob) -> StageJob | None:
        """The job when it has moved, or after a while; None when the service ends."""
        with anyio.CancelScope() as scope:
            self._waits.add(scope)
            if self._closing:
                scope.cancel()
            try:
                return await _moved(daemons, who, job)
            finally:
                self._waits.discard(scope)
        return None


async def _moved(daemons: Daemons, who: Principal, job: StageJob) -> StageJob:
    until = anyio.current_time() + _AWAY_S
    while True:
        try:
            return await daemons.job(who, job.id, job.version, _WAIT_S)
        except DaemonUnavailable:
            if anyio.current_time() > until:
                raise
        # Nothing tells of a daemon that is not there yet.
        await anyio.sleep(_AGAIN_S)


def _event(kind: str, job: StageJob) -> ServerSentEvent:
    return ServerSentEvent(id=str(job.version), event=kind, data=msgspec.json.encode(job).decode(), sep="\n")
