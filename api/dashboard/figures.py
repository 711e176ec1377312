"""Numbers as the page shows them: bars, clocks, and the rows of the lockstep and checkpoint views."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.api.resources import Save
from forebay.core.protocol import LEVELS, LONGEST_RUNWAY_S, Rank
from forebay.core.units import format_bytes

# A runway that is at least this long is a full bar: two minutes outlast any hiccup.
_FULL_RUNWAY_S = 120.0
_LOW_RUNWAY_S = 5.0
_LATE_S = 1.0


@dataclass(frozen=True)
class Bar:
    """`percent` of its width is filled; `kind` is its colour: good, low or bad."""

    percent: float
    kind: str


def bar(part: float, whole: float, *, kind: str = "good") -> Bar:
    return Bar(round(100 * min(1.0, max(0.0, part / whole)), 1) if whole > 0 else 0.0, kind)


def bytes_text(size_bytes: float) -> str:
    return format_bytes(int(size_bytes))


def clock(at: float | None) -> str:
    return datetime.datetime.fromtimestamp(at).strftime("%H:%M:%S") if at else ""


@dataclass(frozen=True)
class RankRow:
    """`wait` is the share of its time that the rank waited for data; `late` holds up the others."""

    rank: Rank
    runway: Bar
    runway_text: str
    wait: Bar
    late: bool


def rank_rows(ranks: Sequence[Rank]) -> list[RankRow]:
    rows = []
    for rank in ranks:
        state = rank.state
        low = state.runway_s < _LOW_RUNWAY_S
        late = state.waiting_s > _LATE_S
        runway = bar(state.runway_s, _FULL_RUNWAY_S, kind="bad" if late else "low" if low else "good")
        share = state.wait_s / max(state.wait_s + state.busy_s, 1e-9)
        wait = bar(share, 1.0, kind="bad" if share > 0.1 else "low" if share > 0.02 else "good")
        text = f"{state.runway_s:.0f} s" if state.runway_s < LONGEST_RUNWAY_S else "all"
        rows.append(RankRow(rank, runway, text, wait, late))
    return rows


@dataclass(frozen=True)
class SaveRow:
    """One save of a run, all its ranks together: how many parts have reached each level at least."""

    run: str
    step: int
    attempt: str
    parts: int
    size_bytes: int
    reached: Sequence[tuple[str, int]]
    error: str


def save_rows(saves: Sequence[Save]) -> list[SaveRow]:
    """In the order of `saves`."""
    found: dict[tuple[str, int, str], list[Save]] = {}
    for save in saves:
        found.setdefault((save.run, save.step, save.attempt), []).append(save)
    rows = []
    for (run, step, attempt), parts in found.items():
        depth = [LEVELS.index(part.level) for part in parts]
        reached = [(level, sum(d >= n for d in depth)) for n, level in enumerate(LEVELS)]
        error = next((part.error for part in parts if part.error), "")
        size_bytes = sum(part.size_bytes for part in parts)
        rows.append(SaveRow(run, step, attempt, len(parts), size_bytes, reached, error or ""))
    return rows
