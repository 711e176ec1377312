"""How far ahead of a plan stagerd is, and how far it may go."""

from __future__ import annotations

import msgspec

from forebay.core.protocol.message import Message

# Of a rank that finds all of its plan staged, as far as lookahead goes.
LONGEST_RUNWAY_S = 1e6


class RankState(msgspec.Struct, frozen=True):
    """A rank at its last look. Times add up since its loader began; `waiting_s` is of the step under way.

    skew_share, storage_bound: of the whole job, as the first rank judged.
    """

    rank: int
    step: int
    wait_s: float
    busy_s: float
    waiting_s: float
    runway_s: float
    skew_share: float
    storage_bound: bool


class Pace(Message, tag="pace", frozen=True):
    """-> Runway, of the plan of that name.

    `keep_bytes`: until the next word nothing is fetched further ahead than that, because other nodes
    need the source more; None for no limit. `state` is shown in stagerd's metrics while the session lives.
    """

    plan: str
    keep_bytes: int | None = None
    state: RankState | None = None


class Runway(Message, tag="runway", frozen=True):
    """Bytes of the plan that lie ahead without a gap, and the shard after which the gap begins.

    `tier`: where that shard comes from (`cold`, `warm`), `waits` when its fetch has not begun. `ends`: there
    is no gap as far as lookahead goes.
    """

    ahead_bytes: int
    ends: bool
    shard: str = ""
    tier: str = ""
