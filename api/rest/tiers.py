"""/v1/tiers and /v1/problems: what this node holds and does now."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from forebay.api.resources import DaemonProblem, ProblemList, Tiers
from forebay.api.rest.daemons import Daemons
from forebay.api.rest.replies import answers, reply
from forebay.api.rest.who import Reader
from forebay.core.errors import ForebayError
from forebay.core.protocol import (
    GetStatus,
    ListProblems,
    Problems,
    StagerStatus,
)

# A daemon keeps them in memory: one that has not told them by then hangs.
_PROBLEMS_S = 5.0


async def recent_problems(daemons: Daemons) -> list[DaemonProblem]:
    """Of both daemons, the newest first; one that is away is itself a problem, told elsewhere."""
    found = []
    for caller, name in ((daemons.stager, "stagerd"), (daemons.checkpoint, "checkpointd")):
        try:
            told = (await caller.ask(ListProblems(), Problems, timeout_s=_PROBLEMS_S)).problems
        except ForebayError:
            continue
        found += [DaemonProblem(name, problem) for problem in told]
    return sorted(found, key=lambda item: item.problem.at, reverse=True)


def router(daemons: Daemons) -> APIRouter:
    routes = APIRouter(tags=["node"])

    @routes.get("/v1/tiers", **answers(Tiers, "The tiers of this node and what is in them"))
    async def tiers(request: Request, who: Reader) -> Response:
        return reply(request, Tiers.of(await daemons.stager.ask(GetStatus(), StagerStatus)))

    @routes.get("/v1/problems", **answers(ProblemList, "The last warnings and errors, newest first"))
    async def problems(request: Request, who: Reader) -> Response:
        """Of the whole node, so that a tenant sees none."""
        return reply(request, ProblemList(await recent_problems(daemons) if who.tenant is None else []))

    return routes
