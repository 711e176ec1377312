"""The dashboard: one page, rendered here, whose inside is fetched again every two seconds.

No script or style comes from anywhere else, and none stands in the page itself (Content-Security-Policy).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from jinja2 import Environment, FileSystemLoader, select_autoescape
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from forebay.api.auth.guard import COOKIE, Guard, principal_in
from forebay.api.auth.principal import Principal
from forebay.api.cluster import Cluster
from forebay.api.dashboard.figures import Bar, bar, bytes_text, clock, rank_rows, save_rows
from forebay.api.rest.daemons import Daemons
from forebay.api.rest.overview import overview
from forebay.core.errors import ForebayError

_HERE = Path(__file__).parent
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TOKEN_BYTES = 8192


def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=select_autoescape(("html",)),
        trim_blocks=True,
    )
    found.filters.update(bytes=bytes_text, clock=clock)
    found.globals.update(bar=bar, Bar=Bar)
    return found


static = StaticFiles(directory=_HERE / "static")


def router(daemons: Daemons, cluster: Cluster) -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    templates = _environment()

    def page(name: str, status: int = 200, **values: Any) -> HTMLResponse:
        return HTMLResponse(templates.get_template(name).render(**values), status, _HEADERS)

    async def inside(who: Principal) -> dict[str, Any]:
        found = await overview(daemons, cluster, who)
        return {
            "o": found,
            "who": who,
            "now": time.time(),
            "ranks": rank_rows(found.ranks),
            "nodes": len({rank.node for rank in found.ranks}),
            "saves": save_rows(found.saves),
        }

    @routes.get("/")
    async def index(request: Request) -> Response:
        who = principal_in(request.scope)
        if "read" not in who.scopes:
            return RedirectResponse("/login", 303, _HEADERS)
        return page("index.html", **await inside(who))

    @routes.get("/ui/live")
    async def live(request: Request) -> Response:
        who = principal_in(request.scope)
        who.require("read")
        return page("live.html", **await inside(who))

    @routes.get("/login")
    async def login() -> Response:
        return page("login.html", problem="")

    @routes.post("/login")
    async def enter(request: Request) -> Response:
        form = parse_qs((await request.body())[:_TOKEN_BYTES].decode("ascii", "replace"))
        token = form.get("token", [""])[0].strip()
        guard: Guard = request.scope["forebay.guard"]
        try:
            await guard.of_token(token)
        except ForebayError as err:
            return page("login.html", err.status, problem=err.message)
        reply = RedirectResponse("/", 303, _HEADERS)
        secure = request.url.scheme == "https"
        reply.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure, path="/")
        return reply

    @routes.post("/logout")
    async def leave() -> Response:
        reply = RedirectResponse("/login", 303, _HEADERS)
        reply.delete_cookie(COOKIE, path="/")
        return reply

    return routes
