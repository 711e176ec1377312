"""Formats: how a shard is cut into samples. One class each, one registry."""

from __future__ import annotations

from typing import Literal, Protocol

from forebay.core.errors import InvalidRequest
from forebay.loaders.index import ShardIndex

Split = Literal["first", "last"]


class Format(Protocol):
    """Finds the samples in a shard."""

    def index(self, fd: int, shard: str) -> ShardIndex:
        """`shard` is the name for errors. Raises kinds of FormatError."""


def open_format(name: str, split: Split) -> Format:
    from forebay.loaders.formats.tar import TarFormat

    if name != "webdataset":
        raise InvalidRequest(f"unknown format {name!r}", hint="this version reads: webdataset")
    return TarFormat(split)
