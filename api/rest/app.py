"""The REST application: wiring, nothing else."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from forebay.api.auth.guard import Guard
from forebay.api.auth.tokens import TokenBook
from forebay.api.cluster import Cluster
from forebay.api.resources import (
    CheckpointDetails,
    CheckpointList,
    NodeJobs,
    NodeList,
    NodeState,
    Overview,
    Page,
    ProblemDetails,
    ProblemList,
    RankList,
    Save,
    Tiers,
)
from forebay.api.rest import datasets, health, jobs, lockstep, nodes, overview, pins, runs, tiers
from forebay.api.rest.audit import Audit
from forebay.api.rest.daemons import Daemons
from forebay.api.rest.events import Streams
from forebay.api.rest.limits import Limits
from forebay.api.rest.problems import RESPONSES, add_handlers
from forebay.api.rest.replies import components
from forebay.core.config import Settings
from forebay.core.protocol import Dataset, Evicted, Pin, ShardState, StageJob

_RESOURCES = (
    ProblemDetails, Dataset, Page[Dataset], Page[ShardState], Page[StageJob], Page[Pin], Page[Save], Evicted,
    NodeState, NodeList, NodeJobs, RankList, Tiers, ProblemList, Overview, CheckpointList, CheckpointDetails,
)  # fmt: skip


class Api:
    """`asgi` serves; `close` comes before its end. `tokens` None: this process is the only caller."""

    def __init__(self, settings: Settings, tokens: TokenBook | None, *, alone: bool = True) -> None:
        self.daemons = Daemons(settings)
        self.streams = Streams(settings.api.streams)
        self.cluster = Cluster(settings)
        self.routes = _routes(self.daemons, self.streams, self.cluster)
        if tokens:
            _add_dashboard(self.routes, self.daemons, self.cluster)
        app: ASGIApp = Audit(Limits(self.routes, settings.api)) if tokens else self.routes
        self.asgi: ASGIApp = Guard(app, settings, tokens, alone=alone)

    async def aclose(self) -> None:
        self.streams.close()
        await self.daemons.aclose()
        await self.cluster.aclose()


def _routes(daemons: Daemons, streams: Streams, cluster: Cluster) -> FastAPI:
    app = FastAPI(
        title="Forebay",
        version="1",
        summary=f"Datasets and checkpoints of a GPU node; forebay {daemons.version}",
        # Its page would load scripts from another host.
        docs_url=None,
        redoc_url=None,
        responses=RESPONSES,
        separate_input_output_schemas=False,
    )
    add_handlers(app)
    for part in (
        health.router(daemons),
        datasets.router(daemons),
        jobs.router(daemons, streams),
        pins.router(daemons),
        tiers.router(daemons),
        runs.router(daemons),
        nodes.router(daemons, cluster),
        lockstep.router(daemons, cluster),
        overview.router(daemons, cluster),
    ):
        app.include_router(part)
    _document(app)
    return app


def _add_dashboard(app: FastAPI, daemons: Daemons, cluster: Cluster) -> None:
    """Only where somebody may look: the command line's own API renders no page."""
    from forebay.api.dashboard import pages

    app.include_router(pages.router(daemons, cluster))
    app.mount("/static", pages.static)


def _document(app: FastAPI) -> None:
    """OpenAPI 3.1 with the schemas of our own structs; made once."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()
            parts = schema.setdefault("components", {})
            parts.setdefault("schemas", {}).update(components(*_RESOURCES))
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            # Not needed on loopback, unless it is set so.
            schema["security"] = [{"token": []}, {}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
