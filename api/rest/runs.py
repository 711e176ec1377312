"""/v1/runs: checkpoints of runs, and the saves that are on their way."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from forebay.api.auth.principal import Principal
from forebay.api.auth.sources import check_source, may_see_run
from forebay.api.resources import CheckpointDetails, CheckpointList, Page, Save
from forebay.api.rest.daemons import Daemons
from forebay.api.rest.pages import Cursor, Limit, page_of
from forebay.api.rest.replies import answers, reply
from forebay.api.rest.who import Admin, Reader, Stager
from forebay.core.errors import NoCheckpoint
from forebay.core.protocol import (
    Checkpoint,
    CheckpointOpened,
    Checkpoints,
    CheckpointStatus,
    Done,
    GetStatus,
    Level,
    ListCheckpoints,
    OpenCheckpoint,
    PinCheckpoint,
    RemoveCheckpoint,
    VerifyCheckpoints,
)

_READ_S = 3600.0

# As checkpointd.layout has it.
Run = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Step = Annotated[int, Path(ge=0, lt=1 << 63)]
Upstream = Annotated[str | None, Query(max_length=2048, description="URL that the run saves to")]


def router(daemons: Daemons) -> APIRouter:
    routes = APIRouter(tags=["runs"])
    settings = daemons.settings

    def check(who: Principal, run: str, upstream: str | None) -> None:
        if not may_see_run(run, who, settings):
            raise NoCheckpoint(f"there is no run {run!r}")
        if upstream is not None:
            check_source(upstream, who, settings)

    async def listed(who: Principal, run: str | None, upstream: str | None) -> list[Checkpoint]:
        wanted = ListCheckpoints(run, upstream)
        found = (await daemons.checkpoint.ask(wanted, Checkpoints, timeout_s=_READ_S)).checkpoints
        return [c for c in found if may_see_run(c.run, who, settings)]

    @routes.get("/v1/saves", **answers(Page[Save], "Saves, newest first, each rank's part by itself"))
    async def saves(
        request: Request,
        who: Reader,
        run: Annotated[str | None, Query(max_length=255)] = None,
        level: Level | None = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> Response:
        found = (await daemons.checkpoint.ask(GetStatus(), CheckpointStatus)).attempts
        seen = [
            Save.of(a) for a in daemons.seen(who, found) if run in (None, a.run) and level in (None, a.level)
        ]
        # Newest first as text that sorts: time counted down from far ahead.
        page = page_of(
            seen, lambda s: f"{1e11 - s.absorbed_at:020.6f}\0{s.attempt}\0{s.rank:09}", cursor, limit
        )
        return reply(request, page)

    @routes.get("/v1/checkpoints", **answers(CheckpointList, "Of all runs in the spool of this node"))
    async def everything(request: Request, who: Reader) -> Response:
        return reply(request, CheckpointList(await listed(who, None, None)))

    @routes.get("/v1/runs/{run}/checkpoints", **answers(CheckpointList, "Committed ones, newest first"))
    async def checkpoints(request: Request, who: Reader, run: Run, upstream: Upstream = None) -> Response:
        """In the spool of this node, and below `upstream`."""
        check(who, run, upstream)
        return reply(request, CheckpointList(await listed(who, run, upstream)))

    @routes.get(
        "/v1/runs/{run}/checkpoints/{step}", **answers(CheckpointDetails, "What a restore would take")
    )
    async def checkpoint(
        request: Request, who: Reader, run: Run, step: Step, upstream: Upstream = None
    ) -> Response:
        check(who, run, upstream)
        wanted = OpenCheckpoint(run, upstream, step, look=True)
        found = await daemons.checkpoint.ask(wanted, CheckpointOpened, timeout_s=_READ_S)
        return reply(request, CheckpointDetails(found.checkpoint, found.files, found.skipped))

    @routes.delete("/v1/runs/{run}/checkpoints/{step}", **answers(CheckpointList, "What went, or would go"))
    async def remove(
        request: Request,
        who: Admin,
        run: Run,
        step: Step,
        upstream: Upstream = None,
        dry_run: Annotated[bool, Query(description="only say what would go")] = False,
    ) -> Response:
        """Upstream if given, else in the spool. Never the newest, a pinned one, or one that is being read."""
        check(who, run, upstream)
        wanted = RemoveCheckpoint(run, upstream, step, dry_run)
        found = await daemons.checkpoint.ask(wanted, Checkpoints, timeout_s=_READ_S)
        return reply(request, CheckpointList(found.checkpoints))

    @routes.post("/v1/runs/{run}/checkpoints/{step}/verify", **answers(CheckpointList, "With what is wrong"))
    async def verify(
        request: Request, who: Stager, run: Run, step: Step, upstream: Upstream = None
    ) -> Response:
        """Read every byte of each copy and compare; `problem` is null where all is well."""
        check(who, run, upstream)
        wanted = VerifyCheckpoints(run, upstream, step)
        found = await daemons.checkpoint.ask(wanted, Checkpoints, timeout_s=_READ_S)
        if not found.checkpoints:
            raise NoCheckpoint(f"there is no checkpoint of {run} at step {step}")
        return reply(request, CheckpointList(found.checkpoints))

    @routes.put("/v1/runs/{run}/checkpoints/{step}/pin", status_code=204, response_class=Response)
    async def pin(who: Stager, run: Run, step: Step, upstream: Upstream = None) -> Response:
        """Retention leaves it alone until it is unpinned."""
        check(who, run, upstream)
        await daemons.checkpoint.ask(PinCheckpoint(run, upstream, step), Done)
        return Response(status_code=204)

    @routes.delete("/v1/runs/{run}/checkpoints/{step}/pin", status_code=204, response_class=Response)
    async def unpin(who: Stager, run: Run, step: Step, upstream: Upstream = None) -> Response:
        """Retention may take it again."""
        check(who, run, upstream)
        await daemons.checkpoint.ask(PinCheckpoint(run, upstream, step, pinned=False), Done)
        return Response(status_code=204)

    return routes
