"""What the API answers: one struct for each kind of resource, for the service and for its clients."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from forebay.core.protocol import (
    AttemptStatus,
    Checkpoint,
    CheckpointFile,
    CheckpointStatus,
    DiskStatus,
    Level,
    Problem,
    Rank,
    SourceStatus,
    StageJob,
    StagerStatus,
)

T = TypeVar("T")
PROBLEM_TYPE = "application/problem+json"


class ProblemDetails(msgspec.Struct, frozen=True):
    """`title` is the error's code: programs go by it. `hint`: what the caller can do."""

    type: str
    title: str
    status: int
    detail: str
    hint: str = ""


class Page(msgspec.Struct, Generic[T], frozen=True):
    """`next_cursor` is null on the last page. A page may hold fewer items than asked for."""

    items: list[T]
    next_cursor: str | None


class HotTier(msgspec.Struct, frozen=True):
    """`held`: allocated by shards; `leased`: of that in use; `reserved`: for what is being fetched."""

    capacity_bytes: int
    held_bytes: int
    leased_bytes: int
    reserved_bytes: int
    overflow_bytes: int
    shards: int
    fetches: int
    evictions: int
    connections: int
    disks: list[DiskStatus]


class WarmTier(msgspec.Struct, frozen=True):
    url: str
    fetched_bytes: int


class ColdTier(msgspec.Struct, frozen=True):
    fetched_bytes: int
    sources: list[SourceStatus]


class Tiers(msgspec.Struct, frozen=True):
    """Bytes fetched, and read by loaders, count since stagerd began. `warm` is null where there is none."""

    node: str
    hot: HotTier
    warm: WarmTier | None
    cold: ColdTier
    read_bytes: int

    @classmethod
    def of(cls, s: StagerStatus) -> Tiers:
        hot = HotTier(
            s.capacity_bytes, s.held_bytes, s.leased_bytes, s.reserved_bytes, s.overflow_bytes, s.shards,
            s.fetches, s.evictions, s.sessions, s.disks,
        )  # fmt: skip
        warm = WarmTier(s.warm, s.fetched_warm_bytes) if s.warm else None
        return cls(s.node, hot, warm, ColdTier(s.fetched_cold_bytes, s.sources), s.read_bytes)


class DaemonProblem(msgspec.Struct, frozen=True):
    daemon: str
    problem: Problem


class ProblemList(msgspec.Struct, frozen=True):
    items: list[DaemonProblem]


class Save(msgspec.Struct, frozen=True):
    """How far one rank's part of a save has come. Times are seconds since the epoch."""

    run: str
    step: int
    attempt: str
    rank: int
    level: Level
    size_bytes: int
    error: str | None
    absorbed_at: float
    local_at: float | None
    replicated_at: float | None
    durable_at: float | None
    committed_at: float | None

    @classmethod
    def of(cls, a: AttemptStatus) -> Save:
        return msgspec.convert(a, cls, from_attributes=True)


class CheckpointDetails(msgspec.Struct, frozen=True):
    """What a restore on this node would take, and which tiers have each file, the nearest first."""

    checkpoint: Checkpoint
    files: list[CheckpointFile]
    skipped: list[str]


class CheckpointList(msgspec.Struct, frozen=True):
    """Newest first."""

    items: list[Checkpoint]


class NodeState(msgspec.Struct, frozen=True):
    """`problems`: of a daemon that does not answer; its state is null then."""

    node: str
    version: str
    stager: StagerStatus | None
    checkpoint: CheckpointStatus | None
    problems: dict[str, ProblemDetails]


class NodeEntry(msgspec.Struct, frozen=True):
    """`url` is empty for the node that answers. Either `state` or `problem` is null."""

    url: str
    state: NodeState | None
    problem: ProblemDetails | None


class NodeList(msgspec.Struct, frozen=True):
    items: list[NodeEntry]


class RankList(msgspec.Struct, frozen=True):
    """`missing`: nodes that did not answer, and why."""

    items: list[Rank]
    missing: dict[str, str] = {}


class NodeJob(msgspec.Struct, frozen=True):
    url: str
    job: StageJob | None
    problem: ProblemDetails | None


class NodeJobs(msgspec.Struct, frozen=True):
    items: list[NodeJob]
    failed: int


class Overview(msgspec.Struct, frozen=True):
    """All that matters now, as far as the caller may see it. `at`: seconds since the epoch.

    Jobs that run come first, then the newest; saves and problems are the newest ones. `away`: daemons that
    do not answer, and why; what they would tell is empty then.
    """

    at: float
    node: str
    version: str
    tiers: Tiers | None
    jobs: list[StageJob]
    ranks: list[Rank]
    saves: list[Save]
    problems: list[DaemonProblem]
    away: dict[str, ProblemDetails]
