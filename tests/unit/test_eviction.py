"""Plans and eviction: Belady's rule against a search by brute force, and the traps around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.journal import Journal
from forebay.stager.catalog import Catalog, Held
from forebay.stager.evictor import Evictor
from forebay.stager.manifest import Manifest, freeze
from forebay.stager.plan import NEVER, Plan, PlanBook
from forebay.stager.schema import MIGRATIONS
from forebay.tiers.store import ObjectInfo

NAMES = "abcdef"
SIZE = 10


def manifest_of(names: str, folder: Path, url: str = "s3://b") -> Manifest:
    async def infos():
        for name in names:
            yield ObjectInfo(name, SIZE, "v")

    async def main() -> Path:
        return (await freeze(infos(), url, folder, by_key=True)).path

    return Manifest(anyio.run(main), url)


class Bench:
    """A dataset, a catalog and an evictor."""

    def __init__(self, folder: Path) -> None:
        self.manifest = manifest_of(NAMES, folder)
        self.ids = {name: self.manifest.shard(number).id for number, name in enumerate(NAMES)}
        self.names = {object_id: name for name, object_id in self.ids.items()}
        self.journal = Journal(folder / "db", MIGRATIONS, durable=False)
        self.catalog = Catalog(self.journal)
        self.plans = PlanBook()
        self.in_use: set[str] = set()
        self.pinned: set[str] = set()
        self.evictor = Evictor(
            "d",
            self.catalog,
            self.plans,
            lambda object_id: self.names[object_id] in self.in_use,
            lambda object_id: self.names[object_id] in self.pinned,
        )

    def plan(self, names: str, window: int = 1) -> Plan:
        return Plan(self.manifest, [NAMES.index(name) for name in names], window)

    def stage(self, name: str, used_at: float = 0.0, tenant: str = "") -> None:
        held = Held(self.ids[name], "d", tenant, SIZE, SIZE, "", "", used_at, 0.0)
        self.catalog.put(held)
        self.evictor.came(held.id)

    def evict(self, name: str) -> None:
        self.catalog.drop(self.ids[name])

    def advance(self, plan: Plan, place: int) -> None:
        for number in plan.advance(place):
            if held := self.catalog.get(self.manifest.shard(number).id):
                self.evictor.came(held.id)

    def choose(self, need: int, later_than: float = -1.0, tenant: str | None = None) -> str | None:
        chosen = self.evictor.choose(need, later_than, tenant)
        return None if chosen is None else "".join(self.names[held.id] for held in chosen)


@contextmanager
def bench() -> Iterator[Bench]:
    with TemporaryDirectory() as folder:
        found = Bench(Path(folder))
        yield found
        found.journal.close()


def test_next_use_counts_bytes_from_the_position():
    with bench() as b:
        plan = b.plan("abcab")
        assert [plan.next_use_bytes(b.ids[name]) for name in "abc"] == [0, 10, 20]
        assert plan.next_use_bytes(b.ids["f"]) == NEVER == plan.next_use_bytes("0" * 32)
        assert plan.advance(2) == [0, 1]
        assert [plan.next_use_bytes(b.ids[name]) for name in "abc"] == [10, 20, 0]


def test_a_shard_being_asked_for_is_its_own_next_use():
    """Between `Advance` and the lease it was the furthest of all, and was evicted: 2 x the fetches."""
    with bench() as b:
        plan = b.plan("abcabc")
        plan.advance(1)
        assert plan.next_use_bytes(b.ids["b"]) == 0


@settings(max_examples=50)
@given(st.text(NAMES, min_size=1, max_size=30), st.data())
def test_next_use_is_what_a_search_finds(names, data):
    with bench() as b:
        plan = b.plan(names)
        position = data.draw(st.integers(0, len(names) - 1))
        plan.advance(position)
        together = plan.next_uses()
        for number, name in enumerate(NAMES):
            at = names.find(name, position)
            expected = NEVER if at < 0 else (at - position) * SIZE
            assert plan.next_use_bytes(b.ids[name]) == expected == together[number]


def test_furthest_next_use_goes_first_then_least_recent():
    with bench() as b:
        b.plans.set(1, b.plan("ab"))
        for name, used_at in (("a", 0), ("b", 0), ("c", 2), ("d", 1)):
            b.stage(name, used_at)
        assert b.choose(30, 5.0) == "dcb"


def test_what_is_in_use_or_pinned_stays_and_comes_back_into_the_ranking():
    with bench() as b:
        for name in "abc":
            b.stage(name)
        b.in_use, b.pinned = {"a"}, {"b"}
        assert b.choose(20) is None
        assert b.choose(10) == "c"
        b.evict("c")
        b.in_use, b.pinned = set(), set()
        b.evictor.rank_again()
        assert sorted(b.choose(20) or "") == ["a", "b"]


def test_a_tenant_over_its_quota_gives_up_its_own():
    with bench() as b:
        b.stage("a", 1, "one")
        b.stage("b", 2, "two")
        b.stage("c", 3, "one")
        assert b.choose(10, tenant="three") is None
        assert b.choose(20, tenant="one") == "ac"
        assert b.choose(10) == "b"


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("stage"), st.sampled_from(NAMES)),
        st.tuples(st.just("use"), st.sampled_from(NAMES)),
        st.tuples(st.just("advance"), st.integers(1, 4)),
        st.tuples(st.just("plan"), st.tuples(st.integers(1, 2), st.text(NAMES, max_size=14))),
        st.tuples(st.just("drop"), st.integers(1, 2)),
        st.tuples(st.just("lease"), st.sampled_from(NAMES)),
        st.tuples(st.just("pin"), st.sampled_from(NAMES)),
        st.tuples(st.just("choose"), st.tuples(st.integers(1, 30), st.sampled_from([-1.0, 5.0, 25.0, 60.0]))),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(OPERATIONS)
def test_the_heap_chooses_as_a_full_search_does(operations):
    """Any life of several plans: the victims' distances are those that sorting everything gives."""
    with bench() as b:
        clock = 0.0
        for verb, what in operations:
            clock += 1
            if verb == "stage":
                b.stage(what, clock)
            elif verb == "use" and (held := b.catalog.get(b.ids[what])):
                b.catalog.put(Held(held.id, "d", "", SIZE, SIZE, "", "", clock, 0.0))
                b.evictor.came(held.id)
            elif verb == "advance":
                for _, plan in b.plans.items():
                    b.advance(plan, plan.position + what)
            elif verb == "plan":
                b.plans.set(what[0], b.plan(what[1]))
            elif verb == "drop":
                b.plans.drop(what)
            elif verb == "lease":
                b.in_use ^= {what}
            elif verb == "pin":
                b.pinned ^= {what}
                b.evictor.rank_again()
            elif verb == "choose":
                _check_choice(b, *what)


def _check_choice(b: Bench, need: int, later_than: float) -> None:
    held = [name for name in NAMES if b.ids[name] in b.catalog]
    distance: Callable[[str], float] = lambda name: b.plans.next_use_bytes(b.ids[name])  # noqa: E731
    able = [name for name in held if name not in b.in_use | b.pinned]
    able = [name for name in able if distance(name) > later_than or distance(name) == NEVER]
    expected = sorted(map(distance, able), reverse=True)[: -(-need // SIZE)]
    chosen = b.choose(need, later_than)
    if len(able) * SIZE < need:
        assert chosen is None
    else:
        assert chosen is not None and sorted(map(distance, chosen), reverse=True) == expected
        for name in chosen:
            b.evict(name)


def test_plans_of_several_sessions_count_the_nearest_use():
    with bench() as b:
        b.plans.set(1, b.plan("ab"))
        b.plans.set(2, b.plan("ba"))
        assert b.plans.next_use_bytes(b.ids["a"]) == 0 == b.plans.next_use_bytes(b.ids["b"])
        b.plans.drop(1)
        assert b.plans.next_use_bytes(b.ids["a"]) == 10


def test_working_set_counts_one_dataset_once(tmp_path: Path):
    with bench() as b:
        b.plans.set(1, b.plan("abcd", window=2))
        assert b.plans.working_set_bytes(2, b.plan("abcd", window=3)) == 30
        other = Plan(manifest_of("xy", tmp_path, "s3://other"), [0, 1], 2)
        assert b.plans.working_set_bytes(2, other) == 40
