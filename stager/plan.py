"""Access plans: what each session will read, and so when each shard is used next.

Distances are bytes: what a session will read before it comes to that shard.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forebay.stager.manifest import Shard

NEVER = math.inf


@dataclass
class Plan:
    """Shards in order of use; `position` is the entry asked for last: the ones before are past."""

    dataset_id: str
    shards: Sequence[Shard]
    window: int = 1
    position: int = 0
    _places: dict[str, list[int]] = field(init=False, repr=False)
    _bytes_before: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._places = {}
        for place, shard in enumerate(self.shards):
            self._places.setdefault(shard.id, []).append(place)
        self._bytes_before = list(itertools.accumulate((s.size_bytes for s in self.shards), initial=0))

    def advance(self, asked_for: int) -> None:
        """An entry is being asked for: what lies before it is past, it is itself the next use.

        Not yet past: between this word and the lease it would look like the best victim of all.
        """
        self.position = max(self.position, min(asked_for, len(self.shards)))

    def next_use_bytes(self, object_id: str) -> float:
        """Bytes until that object is used (again), NEVER when it is not."""
        places = self._places.get(object_id, [])
        at = bisect_left(places, self.position)
        if at == len(places):
            return NEVER
        return self._bytes_before[places[at]] - self._bytes_before[self.position]

    def ahead(self, limit_bytes: int) -> Iterator[tuple[int, Shard]]:
        """(bytes until its use, shard), nearest first, until the limit; the nearest always."""
        for place in range(self.position, len(self.shards)):
            distance = self._bytes_before[place] - self._bytes_before[self.position]
            if distance > limit_bytes:
                return
            yield distance, self.shards[place]

    def working_set_bytes(self) -> int:
        """The most that the session holds open at once: its largest window."""
        sums = (
            self._bytes_before[min(start + self.window, len(self.shards))] - self._bytes_before[start]
            for start in range(len(self.shards))
        )
        return max(sums, default=0)


class PlanBook:
    """All live plans of the node. Owners are sessions and jobs; a plan lives as long as its owner."""

    def __init__(self) -> None:
        self._plans: dict[int, Plan] = {}

    def set(self, owner: int, plan: Plan) -> None:
        self._plans[owner] = plan

    def drop(self, owner: int) -> None:
        self._plans.pop(owner, None)

    def of(self, owner: int) -> Plan | None:
        return self._plans.get(owner)

    def next_use_bytes(self, object_id: str) -> float:
        return min((plan.next_use_bytes(object_id) for plan in self._plans.values()), default=NEVER)

    def ahead(self, limit_bytes: int) -> list[tuple[int, Shard]]:
        """What all plans come to next, nearest first, each object once."""
        nearest: dict[str, tuple[int, Shard]] = {}
        for plan in self._plans.values():
            for distance, shard in plan.ahead(limit_bytes):
                if shard.id not in nearest or distance < nearest[shard.id][0]:
                    nearest[shard.id] = (distance, shard)
        return sorted(nearest.values(), key=lambda item: item[0])

    def working_set_bytes(self, leaving_out: int, plan: Plan) -> int:
        """Bytes held at once when `plan` joins: ranks that read one dataset share their windows."""
        largest: dict[str, int] = {plan.dataset_id: plan.working_set_bytes()}
        for owner, other in self._plans.items():
            if owner != leaving_out and other.window:
                need = other.working_set_bytes()
                largest[other.dataset_id] = max(need, largest.get(other.dataset_id, 0))
        return sum(largest.values())
