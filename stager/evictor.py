"""Whom to give up: furthest next use first (Belady 1966), then least recent use.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966. The future is known from the plans, so the optimum is not a thought experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forebay.stager.catalog import Held


def victims(
    candidates: Iterable[Held],
    need_bytes: int,
    next_use_bytes: Callable[[str], float],
    only_later_than: float,
) -> list[Held] | None:
    """The objects to drop so that `need_bytes` of allocated space come free; None when they cannot.

    Only objects used later than `only_later_than` (bytes ahead) are given up: what comes next must
    not push out what comes sooner. In one class of next use the least recently used goes first.
    """
    ranked = sorted(
        ((next_use_bytes(held.id), held) for held in candidates),
        key=lambda pair: (-pair[0], pair[1].used_at),
    )
    chosen: list[Held] = []
    freed = 0
    for next_use, held in ranked:
        if freed >= need_bytes:
            break
        if next_use <= only_later_than:
            return None
        chosen.append(held)
        freed += held.blocks_bytes
    return chosen if freed >= need_bytes else None
