"""/v1/node and /v1/nodes: this node, and through a gateway all of them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from forebay.api.auth.principal import Principal
from forebay.api.auth.sources import check_source
from forebay.api.client import AsyncClient
from forebay.api.cluster import Answer, Cluster
from forebay.api.resources import NodeEntry, NodeJob, NodeJobs, NodeList, NodeState, ProblemDetails
from forebay.api.rest.daemons import Daemons
from forebay.api.rest.datasets import Name, Text
from forebay.api.rest.jobs import NewStageJob
from forebay.api.rest.problems import details
from forebay.api.rest.replies import answers, reply
from forebay.api.rest.who import IdempotencyKey, Reader, Stager
from forebay.core.errors import DatasetNotFound, ForebayError, InvalidRequest
from forebay.core.protocol import CheckpointStatus, StageJob, StagerStatus

_NONE_DID = 502


class NewNodeJobs(NewStageJob):
    """The same job on the nodes at these URLs, or on all; with `url` it is registered there first."""

    dataset: Text | None = None  # type: ignore[assignment]
    url: Text | None = None
    format: Name = "webdataset"
    name: Name | None = None
    nodes: Annotated[list[Text], Field(min_length=1, max_length=10_000)] | None = None


def router(daemons: Daemons, cluster: Cluster) -> APIRouter:
    routes = APIRouter(tags=["nodes"])

    async def here(who: Principal) -> NodeState:
        stager, checkpoint = await daemons.states()
        problems = {
            name: details(state)
            for name, state in (("stager", stager), ("checkpoint", checkpoint))
            if isinstance(state, ForebayError)
        }
        return _seen(
            NodeState(
                daemons.settings.node,
                daemons.version,
                stager if isinstance(stager, StagerStatus) else None,
                checkpoint if isinstance(checkpoint, CheckpointStatus) else None,
                problems,
            ),
            who,
        )

    def _seen(state: NodeState, who: Principal) -> NodeState:
        if who.tenant is None or state.checkpoint is None:
            return state
        saves = daemons.seen(who, state.checkpoint.attempts)
        return msgspec.structs.replace(
            state, checkpoint=msgspec.structs.replace(state.checkpoint, attempts=saves)
        )

    @routes.get("/v1/node", **answers(NodeState, "This node and its daemons"))
    async def node(request: Request, who: Reader) -> Response:
        return reply(request, await here(who))

    @routes.get(
        "/v1/nodes", **answers(NodeList, "All nodes that this one knows of, with those that are away")
    )
    async def nodes(request: Request, who: Reader) -> Response:
        if not cluster.configured:
            return reply(request, NodeList([NodeEntry("", await here(who), None)]))
        found = await cluster.each(AsyncClient.node, await cluster.urls())
        return reply(
            request,
            NodeList([NodeEntry(a.url, _seen(a.value, who) if a.value else None, _why(a)) for a in found]),
        )

    @routes.post("/v1/nodes/stage-jobs", **answers(NodeJobs, "Begun on some of them at least", 202))
    async def stage(
        request: Request, who: Stager, new: NewNodeJobs, idempotency_key: IdempotencyKey = None
    ) -> Response:
        """Bring a dataset to many nodes. Each answers for itself; 502 when none of them could."""
        if (new.url is None) == (new.dataset is None):
            raise InvalidRequest("name either the `url` of a source or a registered `dataset`")
        if not cluster.configured:
            raise InvalidRequest("this API knows no other nodes", hint="set cluster.nodes, dns or redis")
        if new.url is not None:
            check_source(new.url, who, daemons.settings)
        urls = _chosen(await cluster.urls(), new.nodes)

        async def one(client: AsyncClient) -> StageJob:
            return await _stage_on(client, who, new, idempotency_key)

        found = await cluster.each(one, urls)
        jobs = NodeJobs(
            [NodeJob(a.url, a.value, _why(a)) for a in found], sum(a.error is not None for a in found)
        )
        return reply(request, jobs, 202 if jobs.failed < len(jobs.items) else _NONE_DID)

    return routes


async def _stage_on(client: AsyncClient, who: Principal, new: NewNodeJobs, key: str | None) -> StageJob:
    if new.url is not None:
        tenant = who.tenant or None
        dataset = await client.register(new.url, format=new.format, name=new.name, tenant=tenant)
    else:
        dataset = await client.dataset(new.dataset or "")
    if not who.sees(dataset.tenant):
        # The gateway's own token sees every tenant's.
        raise DatasetNotFound(f"no dataset {new.dataset!r} is registered there")
    return await client.stage(
        dataset.id, glob=new.glob, keys=new.keys, sample=new.sample, tier=new.tier, priority=new.priority,
        deadline_s=new.deadline_s, pin=new.pin, pin_s=new.pin_s, owner=new.owner or who.name,
        key=None if key is None else f"{who.name}:{key}"[-255:],
    )  # fmt: skip


def _chosen(known: list[str], wanted: list[str] | None) -> list[str]:
    """Only nodes of the cluster: a request must not send our token somewhere else. Raises InvalidRequest."""
    if wanted is None:
        if not known:
            raise InvalidRequest("there are no nodes in this cluster now")
        return known
    names = [url.rstrip("/") for url in wanted]
    if unknown := [url for url in names if url not in known]:
        raise InvalidRequest(f"{unknown[0]} is no node of this cluster", hint="GET /v1/nodes shows them")
    return list(dict.fromkeys(names))


def _why(answer: Answer[Any]) -> ProblemDetails | None:
    return details(answer.error) if answer.error else None
