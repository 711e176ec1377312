"""/healthz, /readyz, /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from forebay.api.rest.daemons import Daemons
from forebay.api.rest.who import Reader
from forebay.core import metrics
from forebay.core.errors import ForebayError
from forebay.core.protocol import GetMetrics, MetricsText


def router(daemons: Daemons) -> APIRouter:
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz")
    async def healthz() -> Response:
        """This process answers."""
        return JSONResponse({"status": "ok"})

    @routes.get("/readyz")
    async def readyz() -> Response:
        """Both daemons answer; 503 when one does not."""
        for state in await daemons.states():
            if isinstance(state, ForebayError):
                raise state
        return JSONResponse({"status": "ready"})

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def all_metrics(request: Request, who: Reader) -> Response:
        """Prometheus text of both daemons and of the API; a daemon that is away leaves its part out."""
        parts = []
        for caller in (daemons.stager, daemons.checkpoint):
            try:
                parts.append((await caller.ask(GetMetrics(), MetricsText)).text)
            except ForebayError as err:
                parts.append(f"# {caller.path.stem}: {err.message}\n")
        parts.append(metrics.render(metrics.API))
        return PlainTextResponse("".join(parts), media_type="text/plain; version=0.0.4")

    return routes
