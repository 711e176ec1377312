"""What a route answers: JSON of one of the resources, with an ETag (RFC 9110, 8.8.3), and its schema."""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash
from starlette.requests import Request
from starlette.responses import Response

_JSON = "application/json"


def reply(request: Request, value: object, status: int = 200) -> Response:
    """304 when the caller has it already."""
    body = msgspec.json.encode(value)
    etag = f'"{xxhash.xxh3_64_hexdigest(body)}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if request.method in ("GET", "HEAD") and _has(request, etag):
        return Response(status_code=304, headers=headers)
    return Response(body, status, headers, _JSON)


def _has(request: Request, etag: str) -> bool:
    known = request.headers.get("if-none-match", "")
    return known.strip() == "*" or etag in (tag.strip().removeprefix("W/") for tag in known.split(","))


def answers(kind: Any, description: str, status: int = 200) -> dict[str, Any]:
    """For a route's decorator: the status and the schema that it documents."""
    schema = {"$ref": f"#/components/schemas/{name_of(kind)}"}
    responses = {status: {"description": description, "content": {_JSON: {"schema": schema}}}}
    return {"status_code": status, "responses": responses, "response_class": Response}


def name_of(kind: Any) -> str:
    """`Page[StageJob]` is PageOfStageJob."""
    arguments = getattr(kind, "__args__", ())
    origin = getattr(kind, "__origin__", kind)
    return str(origin.__name__) + "".join(f"Of{name_of(argument)}" for argument in arguments)


def components(*kinds: Any) -> dict[str, Any]:
    """JSON Schema of them all and of what they are made of, under the names that `answers` refers to."""
    _, found = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    wanted = {_generic_name(kind): name_of(kind) for kind in kinds if hasattr(kind, "__origin__")}
    return {wanted.get(name, name): schema for name, schema in found.items()}


def _generic_name(kind: Any) -> str:
    return f"{kind.__origin__.__name__}_{'_'.join(a.__name__ for a in kind.__args__)}_"
