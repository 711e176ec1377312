"""/v1/tiers and /v1/problems: what this node holds and does now."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from forebay.api.rest.daemons import Daemons
from forebay.api.rest.replies import answers, reply
from forebay.api.rest.who import Reader
from forebay.core.errors import ForebayError
from forebay.core.protocol import (
    DiskStatus,
    GetStatus,
    ListProblems,
    Problem,
    Problems,
    SourceStatus,
    StagerStatus,
)


class HotTier(msgspec.Struct, frozen=True):
    """`held`: allocated by shards; `leased`: of that in use; `reserved`: for what is being fetched."""

    capacity_bytes: int
    held_bytes: int
    leased_bytes: int
    reserved_bytes: int
    overflow_bytes: int
    shards: int
    fetches: int
    evictions: int
    connections: int
    disks: list[DiskStatus]


class WarmTier(msgspec.Struct, frozen=True):
    url: str
    fetched_bytes: int


class ColdTier(msgspec.Struct, frozen=True):
    fetched_bytes: int
    sources: list[SourceStatus]


class Tiers(msgspec.Struct, frozen=True):
    """Bytes fetched count since stagerd began. `warm` is null where there is none."""

    node: str
    hot: HotTier
    warm: WarmTier | None
    cold: ColdTier

    @classmethod
    def of(cls, s: StagerStatus) -> Tiers:
        hot = HotTier(
            s.capacity_bytes, s.held_bytes, s.leased_bytes, s.reserved_bytes, s.overflow_bytes, s.shards,
            s.fetches, s.evictions, s.sessions, s.disks,
        )  # fmt: skip
        warm = WarmTier(s.warm, s.fetched_warm_bytes) if s.warm else None
        return cls(s.node, hot, warm, ColdTier(s.fetched_cold_bytes, s.sources))


class DaemonProblem(msgspec.Struct, frozen=True):
    daemon: str
    problem: Problem


class ProblemList(msgspec.Struct, frozen=True):
    items: list[DaemonProblem]


async def recent_problems(daemons: Daemons) -> list[DaemonProblem]:
    """Of both daemons, the newest first; one that is away is itself a problem, told elsewhere."""
    found = []
    for caller, name in ((daemons.stager, "stagerd"), (daemons.checkpoint, "checkpointd")):
        try:
            told = (await caller.ask(ListProblems(), Problems)).problems
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
