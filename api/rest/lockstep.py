"""/v1/lockstep: the ranks of this node, and through a gateway of all of them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from forebay.api.auth.principal import Principal
from forebay.api.client import AsyncClient
from forebay.api.cluster import Cluster
from forebay.api.resources import RankList
from forebay.api.rest.daemons import Daemons
from forebay.api.rest.replies import answers, reply
from forebay.api.rest.who import Reader
from forebay.core.errors import DaemonUnavailable, ForebayError
from forebay.core.protocol import Rank


async def with_others(
    own: list[Rank], cluster: Cluster, who: Principal, within_s: float | None = None
) -> tuple[list[Rank], dict[str, ForebayError]]:
    """Each once, and the nodes that did not answer. Raises DaemonUnavailable for what names the nodes."""
    answered = await cluster.each(AsyncClient.lockstep, await cluster.urls(), within_s=within_s)
    told = [rank for a in answered if a.value for rank in a.value.items if who.sees(rank.tenant)]
    found = {(rank.dataset, rank.state.rank, rank.node): rank for rank in (*own, *told)}
    return [found[at] for at in sorted(found)], {a.url: a.error for a in answered if a.error}


def router(daemons: Daemons, cluster: Cluster) -> APIRouter:
    routes = APIRouter(tags=["nodes"])

    @routes.get("/v1/lockstep", **answers(RankList, "The ranks, as they last told of themselves"))
    async def lockstep(
        request: Request,
        who: Reader,
        cluster_wide: Annotated[
            bool, Query(alias="cluster", description="of all nodes, not this one")
        ] = False,
    ) -> Response:
        if not (cluster_wide and cluster.configured):
            return reply(request, RankList(await daemons.ranks(who)))
        try:
            own = await daemons.ranks(who)
        except DaemonUnavailable:
            # A gateway need not be a node itself.
            own = []
        ranks, missing = await with_others(own, cluster, who)
        return reply(request, RankList(ranks, {url: str(error) for url, error in missing.items()}))

    return routes
