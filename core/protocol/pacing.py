"""How the ranks of a job are fed: what each one tells, and what its node's stagerd answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from forebay.core.protocol.message import Message

# What a rank waits for: a shard that is not here, its samples being cut and decoded, stagerd itself.
Cause = Literal["", "storage", "decoding", "network"]


class RankReport(msgspec.Struct, frozen=True):
    """One rank, now. `wait_s`, `busy_s` and `bytes` add up since the loader began; `waits_s` are those of the
    last steps, of which `step` is the newest. `waiting_s` is how long it has waited so far for the batch
    that it asked for last, 0 when it has it.
    """

    job: str
    rank: int
    world_size: int
    node: str
    step: int
    wait_s: float
    busy_s: float
    bytes: int
    demand_bps: float
    ready: int
    runway_s: float
    waiting_s: float = 0.0
    cause: Cause = ""
    shard: str = ""
    tier: str = ""
    waits_s: list[float] = []


class Pace(Message, tag="pace", frozen=True):
    """A rank's report -> Runway, of the plan of that name.

    `keep_bytes`: until the next report nothing is fetched further ahead than that, because other nodes
    need the source more; None for no limit.
    """

    report: RankReport
    keep_bytes: int | None = None
    plan: str = ""


class Runway(Message, tag="runway", frozen=True):
    """Bytes of the plan that lie ahead without a gap, and the shard after which the gap begins.

    `tier`: where that shard comes from (`cold`, `warm`), `waits` when its fetch has not begun. `ends`: there
    is no gap as far as lookahead goes.
    """

    ahead_bytes: int
    ends: bool
    shard: str = ""
    tier: str = ""
