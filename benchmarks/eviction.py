"""`forebay bench eviction`: hit ratios of replacement policies on the same traces, beside the optimum.

Ours is not a model: the plans, the catalog and the evictor of stagerd, fed with the trace. The
others are LRU, FIFO and coldest-first as caches that download ahead do it (a download counts as an
access, so what was fetched too early is warm and what is used next may be cold).
"""

from __future__ import annotations

import random
import tempfile
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import anyio

from forebay.benchmarks.report import Case, Report
from forebay.core.journal import Journal
from forebay.stager.catalog import Catalog, Held
from forebay.stager.evictor import Evictor
from forebay.stager.manifest import Manifest, freeze
from forebay.stager.plan import Plan, PlanBook
from forebay.stager.schema import MIGRATIONS
from forebay.tiers.store import ObjectInfo

_EPOCHS = 6
_AHEAD = 16
_ANYTHING = -1.0


@dataclass(frozen=True)
class Access:
    """Job `job` reads `shard`; `epoch` and `place` say where in its own order that is."""

    job: int
    epoch: int
    place: int
    shard: int


@dataclass(frozen=True)
class Trace:
    name: str
    shards: int
    orders: list[list[list[int]]]

    def accesses(self) -> list[Access]:
        """The jobs in lockstep, each at the speed that lets all end together."""
        queues = [
            [
                Access(job, epoch, place, shard)
                for epoch, order in enumerate(orders)
                for place, shard in enumerate(order)
            ]
            for job, orders in enumerate(self.orders)
        ]
        longest = max(len(queue) for queue in queues)
        merged = [
            (at * longest / len(queue), job, access)
            for job, queue in enumerate(queues)
            for at, access in enumerate(queue)
        ]
        return [access for _, _, access in sorted(merged, key=lambda item: item[:2])]


def bench(shards: int, share: float, seed: int) -> Report:
    """Unit shards; the first epoch, in which nothing can hit, is left out for all alike."""
    capacity = round(shards * share)
    cases = [_case(trace, capacity, share) for trace in _traces(shards, seed)]
    figures = {
        "hit_over_optimum": min(case.figures["hit_over_optimum"] for case in cases),
        "hit_over_lru": cases[0].figures["hit_over_lru"],
    }
    return Report("eviction", figures, cases, seed)


def _traces(shards: int, seed: int) -> list[Trace]:
    noise = random.Random(seed)

    def shuffled(numbers: range) -> list[int]:
        return noise.sample(numbers, len(numbers))

    whole = range(shards)
    held_out = range(shards - shards // 10, shards)
    return [
        Trace("shuffled epochs", shards, [[shuffled(whole) for _ in range(_EPOCHS)]]),
        Trace("two jobs", shards, [[shuffled(whole) for _ in range(_EPOCHS)] for _ in range(2)]),
        Trace(
            "training and evaluation",
            shards,
            [[shuffled(whole) for _ in range(_EPOCHS)], [list(held_out) for _ in range(2 * _EPOCHS)]],
        ),
    ]


def _case(trace: Trace, capacity: int, share: float) -> Case:
    accesses = trace.accesses()
    optimum = _ratio(_optimum(accesses, capacity), accesses)
    ours = _ratio(_ours(trace, accesses, capacity), accesses)
    peers = {
        name: {"hit_ratio": _ratio(policy(accesses, capacity), accesses)}
        for name, policy in _POLICIES.items()
    }
    figures = {
        "hit_ratio": ours,
        "hit_over_optimum": ours / optimum,
        "hit_over_lru": ours / peers["lru"]["hit_ratio"],
    }
    return Case(trace.name, figures, peers, f"{trace.shards} shards, room for {share:.0%}")


def _ratio(hits: list[bool], accesses: list[Access]) -> float:
    counted = [hit for hit, access in zip(hits, accesses, strict=True) if access.epoch > 0]
    return sum(counted) / len(counted)


def _optimum(accesses: list[Access], capacity: int) -> list[bool]:
    """Belady's MIN with bypass and the whole future."""
    next_at: list[float] = [0.0] * len(accesses)
    last: dict[int, float] = {}
    for at in range(len(accesses) - 1, -1, -1):
        next_at[at] = last.get(accesses[at].shard, float("inf"))
        last[accesses[at].shard] = at
    held: dict[int, float] = {}
    hits = []
    for access, coming in zip(accesses, next_at, strict=True):
        hits.append(access.shard in held)
        held[access.shard] = coming
        if len(held) > capacity:
            del held[max(held, key=held.__getitem__)]
    return hits


def _lru(accesses: list[Access], capacity: int) -> list[bool]:
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for access in accesses:
        hits.append(access.shard in held)
        held[access.shard] = None
        held.move_to_end(access.shard)
        if len(held) > capacity:
            held.popitem(last=False)
    return hits


def _fifo(accesses: list[Access], capacity: int) -> list[bool]:
    held: set[int] = set()
    order: deque[int] = deque()
    hits = []
    for access in accesses:
        hits.append(access.shard in held)
        if access.shard not in held:
            held.add(access.shard)
            order.append(access.shard)
        if len(held) > capacity:
            held.remove(order.popleft())
    return hits


def _coldest(accesses: list[Access], capacity: int) -> list[bool]:
    """As LRU, with downloads `_AHEAD` accesses ahead; a hit is what was not downloaded for this use."""
    held: OrderedDict[int, None] = OrderedDict()
    fetched_for: dict[int, int] = {}
    hits = []
    for at, access in enumerate(accesses):
        ahead = accesses[min(at + _AHEAD, len(accesses) - 1)].shard
        for shard, due in ((ahead, at + _AHEAD), (access.shard, at)):
            if shard not in held:
                fetched_for[shard] = due
            held[shard] = None
            held.move_to_end(shard)
            if len(held) > capacity:
                held.popitem(last=False)
        hits.append(fetched_for.pop(access.shard, None) is None)
    return hits


_POLICIES = {"optimum": _optimum, "lru": _lru, "fifo": _fifo, "coldest_first": _coldest}


def _ours(trace: Trace, accesses: list[Access], capacity: int) -> list[bool]:
    with tempfile.TemporaryDirectory() as name:
        journal = Journal(Path(name) / "catalog.db", MIGRATIONS, durable=False)
        try:
            return _Cache(trace, capacity, Path(name), journal).run(accesses)
        finally:
            journal.close()


class _Cache:
    """stagerd's own parts, without the bytes."""

    def __init__(self, trace: Trace, capacity: int, folder: Path, journal: Journal) -> None:
        self._trace = trace
        self._capacity = capacity
        self._manifest = Manifest(anyio.run(_frozen, trace.shards, folder), "s3://trace")
        self._ids = [self._manifest.shard(number).id for number in range(trace.shards)]
        self._catalog = Catalog(journal)
        self._plans = PlanBook()
        self._open: str | None = None
        self._evictor = Evictor("d", self._catalog, self._plans, self._is_open, lambda _: False)

    def _is_open(self, object_id: str) -> bool:
        return object_id == self._open

    def run(self, accesses: list[Access]) -> list[bool]:
        hits = []
        for clock, access in enumerate(accesses):
            self._advance(access)
            self._open = object_id = self._ids[access.shard]
            hits.append(object_id in self._catalog)
            if not hits[-1]:
                self._bring(object_id, float(clock))
        return hits

    def _advance(self, access: Access) -> None:
        """As a loader does: a plan of this epoch and the next one at its start, then its progress."""
        if access.place == 0:
            orders = self._trace.orders[access.job]
            ahead = orders[access.epoch + 1] if access.epoch + 1 < len(orders) else []
            self._plans.set(access.job, Plan(self._manifest, orders[access.epoch] + ahead))
        plan = self._plans.of(access.job)
        assert plan is not None
        for number in plan.advance(access.place):
            self._evictor.came(self._ids[number])

    def _bring(self, object_id: str, clock: float) -> None:
        if self._catalog.totals().objects >= self._capacity:
            for victim in self._evictor.choose(1, _ANYTHING) or ():
                self._catalog.drop(victim.id)
        self._catalog.put(Held(object_id, "d", "", 1, 1, "", "", clock, clock))
        self._evictor.came(object_id)


async def _frozen(shards: int, folder: Path) -> Path:
    async def infos() -> AsyncIterator[ObjectInfo]:
        for number in range(shards):
            yield ObjectInfo(f"{number:06d}", 1, "v")

    return (await freeze(infos(), "s3://trace", folder, by_key=True)).path
