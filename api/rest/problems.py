"""Errors as problem details (RFC 9457), with the code and the hint of core.errors."""

from __future__ import annotations

from typing import Any

import msgspec
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from forebay.api.resources import PROBLEM_TYPE, ProblemDetails
from forebay.core.errors import ForebayError
from forebay.core.redact import redacted

log = structlog.get_logger()

_TYPES = "urn:forebay:error:"
_AGAIN_S = {429: "1", 503: "1"}


def details(err: ForebayError) -> ProblemDetails:
    return _details(err.status, err.code, err.message, err.hint)


def problem(err: ForebayError) -> Response:
    return _reply(details(err))


def _details(status: int, code: str, detail: str, hint: str = "") -> ProblemDetails:
    return ProblemDetails(f"{_TYPES}{code}", code, status, redacted(detail), redacted(hint))


def _reply(body: ProblemDetails, headers: dict[str, str] | None = None) -> Response:
    reply = Response(msgspec.json.encode(body), body.status, headers, PROBLEM_TYPE)
    if body.status == 401:
        reply.headers["WWW-Authenticate"] = 'Bearer realm="forebay"'
    if again_s := _AGAIN_S.get(body.status):
        reply.headers["Retry-After"] = again_s
    return reply


def add_handlers(app: FastAPI) -> None:
    """Whatever goes wrong in a route leaves in this form."""

    @app.exception_handler(ForebayError)
    async def forebay_error(request: Request, err: ForebayError) -> Response:
        return problem(err)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, err: RequestValidationError) -> Response:
        parts = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in err.errors()]
        return _reply(
            _details(422, "invalid_request", "; ".join(parts), "/openapi.json says what is expected")
        )

    @app.exception_handler(HTTPException)
    async def http(request: Request, err: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(err.status_code, "invalid_request")
        what = f"{request.method} {request.url.path}: {err.detail}"
        headers = dict(err.headers or {})
        if err.status_code == 405:
            headers["Allow"] = ", ".join(_methods(app, request))
        return _reply(_details(err.status_code, code, what), headers)

    @app.exception_handler(Exception)
    async def fault(request: Request, err: Exception) -> Response:
        log.error("request failed", path=request.url.path, error=repr(err), exc_info=err)
        return _reply(_details(500, "error", "this is a fault of Forebay; its log has the trace"))


def _methods(app: FastAPI, request: Request) -> list[str]:
    """Of every route at that path: the router itself tells those of the first one only."""
    paths = app.openapi()["paths"]
    wanted = request.url.path.split("/")
    found = {
        method.upper()
        for path, methods in paths.items()
        for method in methods
        if _fits(path.split("/"), wanted)
    }
    return sorted(found)


def _fits(template: list[str], path: list[str]) -> bool:
    return len(template) == len(path) and all(
        part == given or part.startswith("{") for part, given in zip(template, path, strict=True)
    )


RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "Problem details (RFC 9457)",
        "content": {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}},
    }
}
