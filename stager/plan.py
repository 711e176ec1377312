"""Access plans: what each session will read, and so when each shard is used next.

Distances are bytes: what a session will read before it comes to that shard. A plan is two arrays,
so that one of millions of shards costs some bytes for each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from forebay.core.errors import InvalidRequest
from forebay.stager.demand import DemandMeter
from forebay.stager.manifest import Manifest, Shard

NEVER = math.inf


class Plan:
    """Shards in order of use; `position` is the entry asked for last: the ones before are past."""

    def __init__(
        self,
        manifest: Manifest,
        order: Sequence[int] | npt.NDArray[np.int64],
        window: int = 1,
        tenant: str = "",
        name: str = "",
    ) -> None:
        self.name = name
        self.manifest = manifest
        self.tenant = tenant
        self.demand = DemandMeter()
        self.order = np.asarray(order, dtype=np.int64)
        self.window = window
        self.position = 0
        # Up to where lookahead has found everything fetched, or being fetched.
        self.cursor = 0
        # While other nodes need the source more: no further ahead than this.
        self.keep_bytes: int | None = None
        if len(self.order) and not 0 <= self.order.min() <= self.order.max() < len(manifest):
            raise InvalidRequest(
                f"a plan names shards that {manifest.url} has not (0 to {len(manifest) - 1})"
            )
        self._bytes_before = np.concatenate(([0], np.cumsum(manifest.sizes_bytes[self.order])))
        self._by_number = np.argsort(self.order, kind="stable")
        self._numbers = self.order[self._by_number]

    def __len__(self) -> int:
        return len(self.order)

    def advance(self, asked_for: int) -> list[int]:
        """An entry is being asked for: what lies before it is past, it is itself the next use.

        Not yet past: between this word and the lease it would look like the best victim of all.
        Returns the shards that were passed by this.
        """
        before = self.position
        self.position = max(before, min(asked_for, len(self)))
        self.demand.passed(int(self._bytes_before[self.position] - self._bytes_before[before]))
        return [int(number) for number in self.order[before : self.position]]

    def bytes_until(self, place: int) -> int:
        return int(self._bytes_before[place] - self._bytes_before[self.position])

    def next_use_bytes(self, object_id: str) -> float:
        """Bytes until that object is used (again), NEVER when it is not."""
        number = self.manifest.number_of(object_id)
        return NEVER if number is None else self.next_use_of(number)

    def next_use_of(self, number: int) -> float:
        low, high = np.searchsorted(self._numbers, [number, number + 1])
        places = self._by_number[low:high]
        at = bisect_left(places, self.position)
        return NEVER if at == len(places) else self.bytes_until(int(places[at]))

    def next_uses(self) -> npt.NDArray[np.float64]:
        """For each shard of the dataset at once."""
        found = np.full(len(self.manifest), NEVER)
        ahead = self.order[self.position :][::-1]
        # Assigned from the far end, so that the nearest use of a shard is what stays.
        found[ahead] = (self._bytes_before[self.position : -1] - self._bytes_before[self.position])[::-1]
        return found

    def ahead(self, limit_bytes: int, start: int = 0) -> Iterator[tuple[int, Shard]]:
        """(place, shard), nearest first, from `start` on, until the limit; the nearest always."""
        for place in range(max(self.position, start), len(self)):
            if self.bytes_until(place) > limit_bytes:
                return
            yield place, self.manifest.shard(int(self.order[place]))

    @cached_property
    def working_set_bytes(self) -> int:
        """The most that the session holds open at once: its largest window."""
        if not len(self):
            return 0
        ends = np.minimum(np.arange(len(self)) + self.window, len(self))
        return int((self._bytes_before[ends] - self._bytes_before[: len(self)]).max())


class PlanBook:
    """All live plans of the node. Owners are sessions and jobs; a plan lives as long as its owner.

    `changes` counts plans that came or went: what was ranked by next use before is stale then.
    """

    def __init__(self) -> None:
        self._plans: dict[int, Plan] = {}
        self.changes = 0

    def set(self, owner: int, plan: Plan) -> None:
        self._plans[owner] = plan
        self.changes += 1

    def drop(self, owner: int) -> None:
        if self._plans.pop(owner, None):
            self.changes += 1

    def of(self, owner: int) -> Plan | None:
        return self._plans.get(owner)

    def named(self, name: str) -> Plan | None:
        return next((plan for plan in self._plans.values() if name and plan.name == name), None)

    def items(self) -> list[tuple[int, Plan]]:
        return list(self._plans.items())

    def next_use_bytes(self, object_id: str) -> float:
        """The nearest use in any plan."""
        numbers: dict[int, int | None] = {}
        nearest = NEVER
        for plan in self._plans.values():
            known = id(plan.manifest)
            if known not in numbers:
                numbers[known] = plan.manifest.number_of(object_id)
            if (number := numbers[known]) is not None:
                nearest = min(nearest, plan.next_use_of(number))
        return nearest

    def next_uses(self) -> list[tuple[Manifest, npt.NDArray[np.float64]]]:
        """The nearest use of every shard of every dataset in a plan."""
        found: dict[int, tuple[Manifest, npt.NDArray[np.float64]]] = {}
        for plan in self._plans.values():
            uses = plan.next_uses()
            if known := found.get(id(plan.manifest)):
                uses = np.minimum(uses, known[1])
            found[id(plan.manifest)] = (plan.manifest, uses)
        return list(found.values())

    def working_set_bytes(self, leaving_out: int, plan: Plan) -> int:
        """Bytes held at once when `plan` joins: ranks that read one dataset share their windows."""
        largest = {id(plan.manifest): plan.working_set_bytes}
        for owner, other in self._plans.items():
            if owner != leaving_out and other.window:
                need = other.working_set_bytes
                largest[id(other.manifest)] = max(need, largest.get(id(other.manifest), 0))
        return sum(largest.values())
