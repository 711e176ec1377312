"""What a node says of itself, and what a gateway says of many."""

from __future__ import annotations

import msgspec

from forebay.api.rest.problems import ProblemDetails
from forebay.core.protocol import CheckpointStatus, Rank, StageJob, StagerStatus


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
