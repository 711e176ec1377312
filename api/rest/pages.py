"""Pages of a collection: a cursor is where the next one begins, and means nothing to the caller."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Query

from forebay.api.resources import Page
from forebay.core.errors import InvalidRequest

T = TypeVar("T")
C = TypeVar("C")

Limit = Annotated[int, Query(ge=1, le=1000, description="most items of one page")]
Cursor = Annotated[
    str | None,
    Query(max_length=1024, description="`next_cursor` of the page before", pattern=r"^[A-Za-z0-9_-]+$"),
]


def read_cursor(cursor: str | None, kind: type[C]) -> C | None:
    """Raises InvalidRequest."""
    if cursor is None:
        return None
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return msgspec.json.decode(raw, type=kind)
    except (binascii.Error, ValueError, msgspec.DecodeError) as err:
        raise InvalidRequest("this cursor was not made here", hint="begin without one") from err


def write_cursor(value: Any) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(value)).decode().rstrip("=")


def page_of(items: Sequence[T], key: Callable[[T], str], cursor: str | None, limit: int) -> Page[T]:
    """Of a collection that is small enough to have in one piece, in order of `key`."""
    after = read_cursor(cursor, str)
    ordered = sorted(items, key=key)
    rest = [item for item in ordered if after is None or key(item) > after]
    taken = rest[:limit]
    return Page(taken, write_cursor(key(taken[-1])) if len(rest) > limit else None)
