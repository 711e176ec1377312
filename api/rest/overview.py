"""/v1/overview: what the dashboard and `forebay top` show, in one answer."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from forebay.api.auth.principal import Principal
from forebay.api.cluster import Cluster
from forebay.api.resources import DaemonProblem, Overview, ProblemDetails, Save, Tiers
from forebay.api.rest.daemons import Daemons
from forebay.api.rest.lockstep import with_others
from forebay.api.rest.problems import details
from forebay.api.rest.replies import answers, reply
from forebay.api.rest.tiers import recent_problems
from forebay.api.rest.who import Reader
from forebay.core.errors import DaemonUnavailable, ForebayError
from forebay.core.protocol import Jobs, JobState, ListJobs, Rank, StageJob

_JOBS = 12
_SAVES = 16
_PROBLEMS = 12
# A page is looked at every two seconds: a node that does not answer by then is away.
_NODE_S = 2.0


async def overview(daemons: Daemons, cluster: Cluster, who: Principal) -> Overview:
    """Whatever is away leaves its part out, and is named. Of a cluster the ranks of all nodes are in it."""
    stager, checkpoint = await daemons.states()
    jobs: list[StageJob] = []
    ranks: list[Rank] = []
    away: dict[str, ProblemDetails] = {}
    tiers, saves = None, []
    if isinstance(stager, ForebayError):
        away["stagerd"] = details(stager)
    else:
        tiers = Tiers.of(stager)
        try:
            jobs, ranks = await _jobs(daemons, who), await daemons.ranks(who)
        except DaemonUnavailable as err:
            away["stagerd"] = details(err)
    if cluster.configured:
        try:
            ranks, missing = await with_others(ranks, cluster, who, _NODE_S)
            away |= {url: details(error) for url, error in missing.items()}
        except DaemonUnavailable as err:
            away["cluster"] = details(err)
    if isinstance(checkpoint, ForebayError):
        away["checkpointd"] = details(checkpoint)
    else:
        seen = daemons.seen(who, checkpoint.attempts)
        saves = [Save.of(a) for a in sorted(seen, key=lambda a: a.absorbed_at, reverse=True)[:_SAVES]]
    problems: list[DaemonProblem] = await recent_problems(daemons) if who.tenant is None else []
    return Overview(
        time.time(), daemons.settings.node, daemons.version, tiers, jobs, ranks, saves,
        problems[:_PROBLEMS], away,
    )  # fmt: skip


async def _jobs(daemons: Daemons, who: Principal) -> list[StageJob]:
    async def asked(state: JobState | None) -> list[StageJob]:
        wanted = ListJobs(_JOBS, state=state, tenant=who.tenant)
        return (await daemons.stager.ask(wanted, Jobs)).jobs

    running = await asked("running")
    ids = {job.id for job in running}
    return [*running, *(job for job in await asked(None) if job.id not in ids)][:_JOBS]


def router(daemons: Daemons, cluster: Cluster) -> APIRouter:
    routes = APIRouter(tags=["node"])

    @routes.get("/v1/overview", **answers(Overview, "All that matters on this node now"))
    async def show(request: Request, who: Reader) -> Response:
        return reply(request, await overview(daemons, cluster, who))

    return routes
