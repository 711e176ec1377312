"""/v1/datasets and /v1/shards."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from forebay.api.auth.sources import check_source
from forebay.api.resources import Page
from forebay.api.rest.daemons import Daemons
from forebay.api.rest.pages import Cursor, Limit, page_of, read_cursor, write_cursor
from forebay.api.rest.replies import answers, reply
from forebay.api.rest.who import Admin, IdempotencyKey, Reader, Stager
from forebay.core.errors import Forbidden
from forebay.core.protocol import (
    Dataset,
    DatasetReply,
    Datasets,
    Evict,
    Evicted,
    ListDatasets,
    ListShards,
    Register,
    Selection,
    ShardPage,
    ShardState,
)

_LIST_S = 600.0

Text = Annotated[str, Field(min_length=1, max_length=2048, pattern=r"^[^\x00-\x1f\x7f]+$")]
Name = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f/]+$")]
Glob = Annotated[str, Field(min_length=1, max_length=1024)]


class NewDataset(BaseModel):
    """A dataset to register: all shards below `url`, or the given keys. `tenant`: for whom, if you may."""

    model_config = ConfigDict(extra="forbid", strict=True)
    url: Text
    format: Name = "webdataset"
    name: Name | None = None
    keys: list[Text] | None = None
    tenant: Annotated[str, Field(max_length=64)] = ""


class What(BaseModel):
    """Which staged shards to give up; with `dry_run` only how many would go."""

    model_config = ConfigDict(extra="forbid", strict=True)
    glob: Glob | None = None
    dry_run: bool = False


def router(daemons: Daemons) -> APIRouter:
    routes = APIRouter(tags=["datasets"])

    @routes.get("/v1/datasets", **answers(Page[Dataset], "The datasets that this node knows, by name"))
    async def datasets(
        request: Request,
        who: Reader,
        name: Annotated[
            str | None, Query(max_length=1024, description="only names like this, with * for any")
        ] = None,
        format: Annotated[str | None, Query(max_length=64)] = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> Response:
        found = (await daemons.stager.ask(ListDatasets(), Datasets)).datasets
        seen = [
            d
            for d in found
            if who.sees(d.tenant) and fnmatchcase(d.name, name or "*") and format in (None, d.format)
        ]
        return reply(request, page_of(seen, lambda d: f"{d.name}\0{d.id}", cursor, limit))

    @routes.post("/v1/datasets", **answers(Dataset, "Registered", 201))
    async def register(
        request: Request, who: Stager, new: NewDataset, idempotency_key: IdempotencyKey = None
    ) -> Response:
        """List the source and freeze the listing: what is trained on does not change under a run."""
        check_source(new.url, who, daemons.settings)
        tenant = who.tenant or ""
        if new.tenant:
            if not who.sees(new.tenant):
                raise Forbidden(f"{who.name} may not register for the tenant {new.tenant!r}")
            tenant = new.tenant
        wanted = Register(new.url, new.format, new.name, new.keys, tenant)
        found = await daemons.once(who, idempotency_key, wanted, DatasetReply, timeout_s=_LIST_S)
        return reply(request, found.dataset, 201)

    @routes.get("/v1/datasets/{dataset}", **answers(Dataset, "By id, or the newest listing of that name"))
    async def dataset(request: Request, who: Reader, dataset: str) -> Response:
        return reply(request, await daemons.dataset(who, dataset))

    @routes.post("/v1/datasets/{dataset}/evict", **answers(Evicted, "How many went, or would go"))
    async def evict(request: Request, who: Admin, dataset: str, what: What) -> Response:
        """Give up what is staged, but for what is in use or pinned."""
        found = await daemons.dataset(who, dataset)
        wanted = Evict(found.id, Selection(glob=what.glob), what.dry_run)
        return reply(request, await daemons.stager.ask(wanted, Evicted))

    @routes.get("/v1/shards", **answers(Page[ShardState], "The shards of a dataset, in order"))
    async def shards(
        request: Request,
        who: Reader,
        dataset: Annotated[str, Query(max_length=1024, description="id or name")],
        staged: Annotated[bool | None, Query(description="only those that are staged, or are not")] = None,
        glob: Annotated[
            str | None, Query(min_length=1, max_length=1024, description="only keys like this")
        ] = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> Response:
        found = await daemons.dataset(who, dataset)
        after = read_cursor(cursor, int)
        wanted = ListShards(found.id, -1 if after is None else after, limit, glob, staged)
        page = await daemons.stager.ask(wanted, ShardPage)
        following = None if page.after is None else write_cursor(page.after)
        return reply(request, Page(page.shards, following))

    return routes
