"""REST under /v1, stateless: each request asks a daemon over its socket.

Errors are problem details (RFC 9457) with the code and the hint of core.errors.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict

from forebay.core.channel import Channel, ask, close_all
from forebay.core.config import Settings
from forebay.core.errors import DatasetNotFound, ForebayError
from forebay.core.protocol import (
    AddPin,
    CancelJob,
    Checkpoints,
    CheckpointStatus,
    Dataset,
    DatasetReply,
    Datasets,
    Done,
    DropPin,
    GetMetrics,
    GetStatus,
    JobReply,
    Jobs,
    ListCheckpoints,
    ListDatasets,
    ListJobs,
    ListPins,
    MetricsText,
    PinReply,
    Pins,
    Register,
    RetryJob,
    Selection,
    Stage,
    StagerStatus,
    WaitJob,
)

PROBLEM = "application/problem+json"


class NewDataset(BaseModel):
    """A dataset to register: all shards below `url`, or the given keys."""

    model_config = ConfigDict(extra="forbid")
    url: str
    format: str = "webdataset"
    name: str | None = None
    keys: list[str] | None = None


class NewStageJob(BaseModel):
    """A dataset (id or name), or a part of it, to bring into a tier."""

    model_config = ConfigDict(extra="forbid")
    dataset: str
    glob: str | None = None
    keys: list[str] | None = None
    sample: float | None = None
    tier: Literal["hot", "warm"] = "hot"
    priority: float = 1.0
    deadline_s: float | None = None
    pin: bool = False
    pin_s: float | None = None
    owner: str = "api"


class NewPin(BaseModel):
    """A dataset (id or name), or a part of it, to keep."""

    model_config = ConfigDict(extra="forbid")
    dataset: str
    owner: str = "api"
    glob: str | None = None
    ttl_s: float | None = None


def create_app(settings: Settings) -> FastAPI:
    app = FastAPI(title="Forebay", version="1", docs_url="/docs", redoc_url=None)
    _add_errors(app)
    _add_health(app, settings)
    _add_datasets(app, settings)
    _add_stage_jobs(app, settings)
    _add_pins(app, settings)

    @app.get("/v1/tiers")
    def tiers() -> Any:
        """The tiers of this node and what is in them."""
        status = ask(settings.stager_socket, GetStatus(), expect=StagerStatus, role="api")
        return _json({"hot": status})

    @app.get("/v1/runs/{run}/checkpoints")
    def checkpoints(run: str, upstream: str | None = None) -> Any:
        """Committed checkpoints, newest first, in the spool and under `upstream`."""
        request = ListCheckpoints(run, upstream)
        reply = ask(settings.checkpoint_socket, request, expect=Checkpoints, role="api")
        return _json({"items": reply.checkpoints})

    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ForebayError)
    def forebay_error(request: Request, err: ForebayError) -> JSONResponse:
        return _problem(err.status, err.code, err.message, err.hint)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, err: RequestValidationError) -> JSONResponse:
        parts = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in err.errors()]
        return _problem(422, "invalid_request", "; ".join(parts), "see /docs for what is expected")


def _add_health(app: FastAPI, settings: Settings) -> None:
    @app.get("/healthz")
    def healthz() -> Any:
        """This process answers."""
        return {"status": "ok"}

    @app.get("/readyz")
    def readyz() -> Any:
        """Both daemons answer; 503 when one does not."""
        ask(settings.stager_socket, GetStatus(), expect=StagerStatus, role="api")
        ask(settings.checkpoint_socket, GetStatus(), expect=CheckpointStatus, role="api")
        return {"status": "ready"}

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        """Prometheus text of both daemons; a daemon that is away leaves its part out."""
        parts = []
        for socket in (settings.stager_socket, settings.checkpoint_socket):
            try:
                parts.append(ask(socket, GetMetrics(), expect=MetricsText, role="api").text)
            except ForebayError as err:
                parts.append(f"# {socket.name}: {err.message}\n")
        return PlainTextResponse("".join(parts), media_type="text/plain; version=0.0.4")


def _add_datasets(app: FastAPI, settings: Settings) -> None:
    @app.get("/v1/datasets")
    def datasets() -> Any:
        reply = ask(settings.stager_socket, ListDatasets(), expect=Datasets, role="api")
        return _json({"items": reply.datasets})

    @app.post("/v1/datasets", status_code=201)
    def register(new: NewDataset) -> Any:
        """List the source and freeze the listing."""
        request = Register(new.url, new.format, new.name, new.keys)
        return _json(register_dataset(settings, request, "api"), 201)

    @app.get("/v1/datasets/{dataset}")
    def dataset(dataset: str) -> Any:
        return _json(find_dataset(settings, dataset, "api"))


def _add_stage_jobs(app: FastAPI, settings: Settings) -> None:
    socket = settings.stager_socket

    @app.get("/v1/stage-jobs")
    def jobs() -> Any:
        return _json({"items": ask(socket, ListJobs(), expect=Jobs, role="api").jobs})

    @app.post("/v1/stage-jobs", status_code=202)
    def stage(new: NewStageJob) -> Any:
        """Bring a registered dataset into the hot tier."""
        found = find_dataset(settings, new.dataset, "api")
        request = Stage(
            found.id,
            Selection(new.glob, new.keys, new.sample),
            new.tier,
            new.priority,
            new.deadline_s,
            new.pin,
            new.pin_s,
            new.owner,
        )
        return _json(ask(socket, request, expect=JobReply, role="api").job, 202)

    @app.get("/v1/stage-jobs/{job_id}")
    def job(job_id: str) -> Any:
        return _json(ask(socket, WaitJob(job_id), expect=JobReply, role="api").job)

    @app.delete("/v1/stage-jobs/{job_id}")
    def cancel(job_id: str) -> Any:
        """Call it off; what it brought stays."""
        return _json(ask(socket, CancelJob(job_id), expect=JobReply, role="api").job)

    @app.post("/v1/stage-jobs/{job_id}/retry", status_code=202)
    def retry(job_id: str) -> Any:
        """Try the shards that failed again."""
        return _json(ask(socket, RetryJob(job_id), expect=JobReply, role="api").job, 202)


def _add_pins(app: FastAPI, settings: Settings) -> None:
    socket = settings.stager_socket

    @app.get("/v1/pins")
    def pins() -> Any:
        return _json({"items": ask(socket, ListPins(), expect=Pins, role="api").pins})

    @app.post("/v1/pins", status_code=201)
    def pin(new: NewPin) -> Any:
        """Keep what is or will be staged of a dataset."""
        found = find_dataset(settings, new.dataset, "api")
        request = AddPin(found.id, new.owner, Selection(new.glob), new.ttl_s)
        return _json(ask(socket, request, expect=PinReply, role="api").pin, 201)

    @app.delete("/v1/pins/{pin_id}", status_code=204)
    def unpin(pin_id: str) -> Response:
        ask(socket, DropPin(pin_id), expect=Done, role="api")
        return Response(status_code=204)


def register_dataset(settings: Settings, request: Register, role: str) -> Dataset:
    with Channel.connect(settings.stager_socket, role) as channel:
        reply, fds = channel.request(request, expect=DatasetReply, timeout_s=600.0)
        close_all(fds)
        return reply.dataset


def find_dataset(settings: Settings, id_or_name: str, role: str) -> Dataset:
    """The newest listing under that name, with what of it is staged. Raises DatasetNotFound."""
    reply = ask(settings.stager_socket, ListDatasets(), expect=Datasets, role=role)
    found = next((d for d in reply.datasets if id_or_name in (d.id, d.name)), None)
    if found is None:
        raise DatasetNotFound(f"no dataset {id_or_name!r} is registered on this node")
    return found


def _json(value: Any, status: int = 200) -> JSONResponse:
    return JSONResponse(msgspec.to_builtins(value), status)


def _problem(status: int, code: str, detail: str, hint: str) -> JSONResponse:
    body = {"type": f"about:blank#{code}", "title": code, "status": status, "detail": detail, "hint": hint}
    return JSONResponse(body, status, media_type=PROBLEM)
