"""What one rank tells the others."""

from __future__ import annotations

from typing import Literal

import msgspec

# What a rank waits for: a shard that is not here, its samples being cut and decoded, stagerd itself.
Cause = Literal["", "storage", "decoding", "network"]


class RankReport(msgspec.Struct, frozen=True):
    """One rank, now. `wait_s`, `busy_s` and `bytes` add up since the loader began; `waits_s` are those of the
    last steps, of which `step` is the newest. `waiting_s` is how long it has waited so far for the batch
    that it asked for last, 0 when it has it.
    """

    rank: int
    node: str
    step: int
    wait_s: float
    busy_s: float
    bytes: int
    demand_bps: float
    runway_s: float
    waiting_s: float = 0.0
    cause: Cause = ""
    shard: str = ""
    tier: str = ""
    waits_s: list[float] = []
