"""Whom to give up: furthest next use first (Belady 1966), then least recent use.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966. The future is known from the plans, so the optimum is not a thought experiment.

Objects in a plan stand in a heap by the distance that was true when they were put there. As plans
advance that distance only shrinks, so it is a bound from above: the top is looked at again before
it is believed. What was just used jumps to the far end, and is put in anew. Objects in no plan come
from the catalog by least recent use; they go before all others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from forebay.stager.catalog import Catalog, Held
from forebay.stager.plan import NEVER, PlanBook


class Evictor:
    """Of one disk. `in_use` says which objects are open somewhere, `pinned` which must stay."""

    def __init__(
        self,
        disk: str,
        catalog: Catalog,
        plans: PlanBook,
        in_use: Callable[[str], bool],
        pinned: Callable[[str], bool],
    ) -> None:
        self._disk = disk
        self._catalog = catalog
        self._plans = plans
        self._in_use = in_use
        self._pinned = pinned
        self._ranked_at = -1
        self._heap: list[tuple[float, float, str]] = []
        self._entries: dict[str, tuple[float, float, str]] = {}
        self._outside: Iterator[Held] = iter(())
        self._later: dict[str, None] = {}

    def came(self, object_id: str) -> None:
        """Staged, or used: its next use is another now. Looked at when a victim is looked for."""
        if self._ranked_at >= 0:
            self._later[object_id] = None

    def rank_again(self) -> None:
        """What may stay has changed (pins): all of it is looked at anew."""
        self._ranked_at = -1

    def choose(self, need_bytes: int, only_later_than: float, tenant: str | None = None) -> list[Held] | None:
        """The objects to drop so that `need_bytes` of allocated space come free; None when they cannot.

        Only objects used later than `only_later_than` (bytes ahead) are given up: what comes next must
        not push out what comes sooner. In no plan, the older gives way to the newer. With `tenant`, only
        what was staged for that tenant.
        """
        if self._ranked_at != self._plans.changes:
            self._rank()
        chosen: list[tuple[float, Held]] = []
        passed_over: list[tuple[float, Held]] = []
        freed = 0
        for distance, held in self._candidates():
            if distance <= only_later_than and distance != NEVER:
                passed_over.append((distance, held))
                break
            if self._in_use(held.id) or (tenant is not None and held.tenant != tenant):
                passed_over.append((distance, held))
                continue
            chosen.append((distance, held))
            freed += held.blocks_bytes
            if freed >= need_bytes:
                break
        enough = freed >= need_bytes
        self._put_back(passed_over if enough else [*chosen, *passed_over])
        return [held for _, held in chosen] if enough else None

    def _candidates(self) -> Iterable[tuple[float, Held]]:
        """Furthest first, each taken out of the ranking."""
        for held in self._unplanned():
            yield NEVER, held
        while self._heap:
            entry = heapq.heappop(self._heap)
            negative, used_at, object_id = entry
            if self._entries.get(object_id) is not entry:
                continue
            del self._entries[object_id]
            if (ranked := self._evictable(object_id)) is None:
                continue
            distance = self._plans.next_use_bytes(object_id)
            if distance < -negative:
                self._push(distance, used_at, object_id)
            else:
                yield distance, ranked

    def _evictable(self, object_id: str) -> Held | None:
        """As the catalog has it now; None when it is gone, elsewhere or pinned."""
        held = self._catalog.get(object_id)
        return held if held and held.disk == self._disk and not self._pinned(object_id) else None

    def _unplanned(self) -> Iterator[Held]:
        for listed in self._outside:
            if (held := self._evictable(listed.id)) is None:
                continue
            if held.used_at > listed.used_at:
                self._later[held.id] = None
            elif self._plans.next_use_bytes(held.id) == NEVER:
                yield held
        for object_id in list(self._later):
            del self._later[object_id]
            if (late := self._evictable(object_id)) is None:
                continue
            distance = self._plans.next_use_bytes(late.id)
            if distance == NEVER:
                yield late
            else:
                self._push(distance, late.used_at, late.id)

    def _put_back(self, candidates: list[tuple[float, Held]]) -> None:
        unplanned = {held.id: None for distance, held in candidates if distance == NEVER}
        # First again, as they were.
        self._later = {**unplanned, **self._later}
        for distance, held in candidates:
            if distance != NEVER:
                self._push(distance, held.used_at, held.id)

    def _push(self, distance: float, used_at: float, object_id: str) -> None:
        entry = (-distance, used_at, object_id)
        self._entries[object_id] = entry
        heapq.heappush(self._heap, entry)

    def _rank(self) -> None:
        self._ranked_at = self._plans.changes
        self._outside = self._catalog.least_recent(self._disk)
        self._later.clear()
        uses: dict[str, float] = {}
        ids = self._catalog.ids(self._disk)
        for manifest, next_uses in self._plans.next_uses():
            for object_id, number in zip(ids, manifest.numbers_of(ids), strict=True):
                if number >= 0 and next_uses[number] != NEVER:
                    uses[object_id] = min(float(next_uses[number]), uses.get(object_id, NEVER))
        self._entries = {object_id: (-distance, 0.0, object_id) for object_id, distance in uses.items()}
        self._heap = list(self._entries.values())
        heapq.heapify(self._heap)
