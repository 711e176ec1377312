"""What faces for people and programs ask of a daemon: pages, ranks, recent problems, a request done once."""

from __future__ import annotations

import msgspec

from forebay.core.protocol.message import Message
from forebay.core.protocol.pacing import RankState


class Once(Message, tag="once", frozen=True):
    """Do a request, encoded as a frame, at most once under this key -> its reply, the same one each time.

    Outlives a restart of the daemon. Raises KeyReused when the key stood for another request.
    """

    key: str
    request: bytes


class ShardState(msgspec.Struct, frozen=True):
    number: int
    key: str
    size_bytes: int
    version: str
    staged: bool


class ListShards(Message, tag="list_shards", frozen=True):
    """The shards after number `after` that fit -> ShardPage. `glob` on the key (fnmatch)."""

    dataset_id: str
    after: int = -1
    limit: int = 1000
    glob: str | None = None
    staged: bool | None = None


class ShardPage(Message, tag="shard_page", frozen=True):
    """`after` of the next page; None at the end. A page of a rare kind may be short, even empty."""

    shards: list[ShardState]
    after: int | None


class Rank(msgspec.Struct, frozen=True):
    """A loader that is connected now, as it last told of itself."""

    node: str
    dataset: str
    tenant: str
    told_at: float
    state: RankState


class ListRanks(Message, tag="list_ranks", frozen=True):
    """-> Ranks."""


class Ranks(Message, tag="ranks", frozen=True):
    ranks: list[Rank]


class Problem(msgspec.Struct, frozen=True):
    """A warning or an error of a daemon's log. `at`: seconds since the epoch."""

    at: float
    level: str
    event: str
    detail: str


class ListProblems(Message, tag="list_problems", frozen=True):
    """-> Problems."""


class Problems(Message, tag="problems", frozen=True):
    """The newest first; what lies further back is in the log."""

    problems: list[Problem]
