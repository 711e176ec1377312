"""A line of log for each request that changes something, and counts of all of them."""

from __future__ import annotations

import time
import uuid

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.api.auth.guard import SAFE_METHODS, principal_in
from forebay.core import metrics

log = structlog.get_logger()
_KNOWN = (*SAFE_METHODS, "POST", "PUT", "PATCH", "DELETE")


class Audit:
    """Directly below the guard, so that what limits refuse is told as well."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_at, status = time.monotonic(), 0
        request_id = uuid.uuid4().hex[:12]

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", request_id.encode()))
            await send(message)

        try:
            await self._app(scope, receive, told)
        finally:
            metrics.api_requests.labels(
                scope["method"] if scope["method"] in _KNOWN else "other", status
            ).inc()
            metrics.api_seconds.observe(time.monotonic() - began_at)
            if scope["method"] not in SAFE_METHODS:
                self._tell(scope, status, request_id)

    def _tell(self, scope: Scope, status: int, request_id: str) -> None:
        who = principal_in(scope)
        log.info(
            "audit",
            who=who.name,
            tenant=who.tenant,
            client=(scope.get("client") or ("local", 0))[0],
            method=scope["method"],
            path=scope["path"],
            status=status,
            request=request_id,
        )
