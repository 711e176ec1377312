"""How far ahead of a plan stagerd is, and how far it may go."""

from __future__ import annotations

from forebay.core.protocol.message import Message


class Pace(Message, tag="pace", frozen=True):
    """-> Runway, of the plan of that name.

    `keep_bytes`: until the next word nothing is fetched further ahead than that, because other nodes
    need the source more; None for no limit.
    """

    plan: str
    keep_bytes: int | None = None


class Runway(Message, tag="runway", frozen=True):
    """Bytes of the plan that lie ahead without a gap, and the shard after which the gap begins.

    `tier`: where that shard comes from (`cold`, `warm`), `waits` when its fetch has not begun. `ends`: there
    is no gap as far as lookahead goes.
    """

    ahead_bytes: int
    ends: bool
    shard: str = ""
    tier: str = ""
