"""/v1/pins."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from forebay.api.auth.principal import Principal
from forebay.api.resources import Page
from forebay.api.rest.daemons import Daemons
from forebay.api.rest.datasets import Glob, Text
from forebay.api.rest.jobs import Seconds
from forebay.api.rest.pages import Cursor, Limit, page_of
from forebay.api.rest.replies import answers, reply
from forebay.api.rest.who import IdempotencyKey, Reader, Stager
from forebay.core.errors import NotFound
from forebay.core.protocol import AddPin, Done, DropPin, ListPins, Pin, PinReply, Pins, Selection


class NewPin(BaseModel):
    """A dataset (id or name), or a part of it, to keep; for `ttl_s`, or until the pin is removed."""

    model_config = ConfigDict(extra="forbid", strict=True)
    dataset: Text
    owner: Annotated[str, Field(max_length=255)] = ""
    glob: Glob | None = None
    ttl_s: Seconds | None = None


def router(daemons: Daemons) -> APIRouter:
    routes = APIRouter(tags=["pins"])

    async def seen_by(who: Principal) -> list[Pin]:
        found = (await daemons.stager.ask(ListPins(), Pins)).pins
        return [pin for pin in found if who.sees(pin.tenant)]

    @routes.get("/v1/pins", **answers(Page[Pin], "In order of their making"))
    async def pins(
        request: Request,
        who: Reader,
        owner: Annotated[str | None, Query(max_length=255)] = None,
        dataset_id: Annotated[str | None, Query(max_length=255)] = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> Response:
        found = [
            pin
            for pin in await seen_by(who)
            if owner in (None, pin.owner) and dataset_id in (None, pin.dataset_id)
        ]
        return reply(request, page_of(found, lambda pin: f"{pin.made_at:020.6f}\0{pin.id}", cursor, limit))

    @routes.post("/v1/pins", **answers(Pin, "Made", 201))
    async def pin(
        request: Request, who: Stager, new: NewPin, idempotency_key: IdempotencyKey = None
    ) -> Response:
        """Keep what is or will be staged of a dataset."""
        found = await daemons.dataset(who, new.dataset)
        wanted = AddPin(found.id, new.owner or who.name, Selection(new.glob), new.ttl_s)
        return reply(request, (await daemons.once(who, idempotency_key, wanted, PinReply)).pin, 201)

    @routes.delete("/v1/pins/{pin_id}", status_code=204, response_class=Response)
    async def unpin(who: Stager, pin_id: str) -> Response:
        """Let its shards be evicted again."""
        if pin_id not in (pin.id for pin in await seen_by(who)):
            raise NotFound(f"there is no pin {pin_id!r}", hint="GET /v1/pins shows them")
        await daemons.stager.ask(DropPin(pin_id), Done)
        return Response(status_code=204)

    return routes
