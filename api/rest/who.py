"""The scope that a route asks for, as a parameter: `who: Reader`, `who: Stager`, `who: Admin`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Header, Request

from forebay.api.auth.guard import principal_in
from forebay.api.auth.principal import Principal, Scope


def _with(scope: Scope) -> Callable[[Request], Principal]:
    async def found(request: Request) -> Principal:
        who = principal_in(request.scope)
        who.require(scope)
        return who

    return found  # type: ignore[return-value]


Reader = Annotated[Principal, Depends(_with("read"))]
Stager = Annotated[Principal, Depends(_with("stage"))]
Admin = Annotated[Principal, Depends(_with("admin"))]

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="the same request with the same key is done once, and answered the same, for a day",
    ),
]
