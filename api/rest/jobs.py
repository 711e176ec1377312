"""/v1/stage-jobs."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from forebay.api.resources import Page
from forebay.api.rest.daemons import Daemons
from forebay.api.rest.datasets import Glob, Text
from forebay.api.rest.events import Streams
from forebay.api.rest.pages import Cursor, Limit, read_cursor, write_cursor
from forebay.api.rest.replies import answers, reply
from forebay.api.rest.who import IdempotencyKey, Reader, Stager
from forebay.core.protocol import (
    CancelJob,
    JobReply,
    Jobs,
    JobState,
    ListJobs,
    RetryJob,
    Selection,
    Stage,
    StageJob,
    Target,
)

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class NewStageJob(BaseModel):
    """A dataset (id or name), or a part of it, to bring into a tier."""

    model_config = ConfigDict(extra="forbid", strict=True)
    dataset: Text
    glob: Glob | None = None
    keys: list[Text] | None = None
    sample: Annotated[float, Field(gt=0, le=1)] | None = None
    tier: Literal["hot", "warm"] = "hot"
    priority: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    deadline_s: Seconds | None = None
    pin: bool = False
    pin_s: Seconds | None = None
    owner: Annotated[str, Field(max_length=255)] = ""

    def message(self, dataset_id: str, who: str) -> Stage:
        target: Target = self.tier
        selection = Selection(self.glob, self.keys, self.sample)
        return Stage(
            dataset_id,
            selection,
            target,
            self.priority,
            self.deadline_s,
            self.pin,
            self.pin_s,
            self.owner or who,
        )


def router(daemons: Daemons, streams: Streams) -> APIRouter:
    routes = APIRouter(tags=["stage-jobs"])

    @routes.get("/v1/stage-jobs", **answers(Page[StageJob], "Newest first"))
    async def jobs(
        request: Request,
        who: Reader,
        state: JobState | None = None,
        dataset: Annotated[str | None, Query(max_length=1024, description="id or name")] = None,
        owner: Annotated[str | None, Query(max_length=255)] = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> Response:
        before = read_cursor(cursor, tuple[float, str])
        wanted = ListJobs(limit + 1, before, state, dataset, owner, who.tenant)
        found = (await daemons.stager.ask(wanted, Jobs)).jobs
        taken = found[:limit]
        more = write_cursor((taken[-1].started_at, taken[-1].id)) if len(found) > limit else None
        return reply(request, Page(taken, more))

    @routes.post("/v1/stage-jobs", **answers(StageJob, "Begun", 202))
    async def stage(
        request: Request, who: Stager, new: NewStageJob, idempotency_key: IdempotencyKey = None
    ) -> Response:
        """Bring a registered dataset, or a part of it, into a tier."""
        found = await daemons.dataset(who, new.dataset)
        wanted = new.message(found.id, who.name)
        job = (await daemons.once(who, idempotency_key, wanted, JobReply)).job
        return reply(request, job, 202)

    @routes.get("/v1/stage-jobs/{job_id}", **answers(StageJob, "As it is now"))
    async def job(
        request: Request,
        who: Reader,
        job_id: str,
        after: Annotated[
            int | None, Query(ge=0, lt=1 << 63, description="answer when its version is another")
        ] = None,
        wait_s: Annotated[float, Query(ge=0, le=60, description="or after so many seconds")] = 0,
    ) -> Response:
        """With `after` and `wait_s` a long poll: for those who cannot follow `/events`."""
        # Whose it is comes first: nobody waits on a job that is not theirs.
        now = await daemons.job(who, job_id)
        if now.version == after and wait_s:
            now = await daemons.job(who, job_id, after, wait_s)
        return reply(request, now)

    @routes.get("/v1/stage-jobs/{job_id}/events", response_class=Response, responses=Streams.RESPONSES)
    async def events(
        request: Request,
        who: Reader,
        job_id: str,
        last_event_id: Annotated[
            str | None, Header(pattern=r"^[0-9]{1,18}$", description="the last one that came")
        ] = None,
    ) -> Response:
        """Progress as server-sent events until the job ends; go on with `Last-Event-ID`."""
        now = await daemons.job(who, job_id)
        return streams.follow(daemons, who, now, None if last_event_id is None else int(last_event_id))

    @routes.delete("/v1/stage-jobs/{job_id}", **answers(StageJob, "As it ended"))
    async def cancel(request: Request, who: Stager, job_id: str) -> Response:
        """Call it off; what it brought stays."""
        await daemons.job(who, job_id)
        return reply(request, (await daemons.stager.ask(CancelJob(job_id), JobReply)).job)

    @routes.post("/v1/stage-jobs/{job_id}/retry", **answers(StageJob, "Begun again", 202))
    async def retry(
        request: Request, who: Stager, job_id: str, idempotency_key: IdempotencyKey = None
    ) -> Response:
        """Try the shards that failed again."""
        await daemons.job(who, job_id)
        return reply(request, (await daemons.once(who, idempotency_key, RetryJob(job_id), JobReply)).job, 202)

    return routes
