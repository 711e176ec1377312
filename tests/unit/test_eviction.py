"""Plans and eviction: Belady's rule, and the traps around it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.stager.catalog import Held
from forebay.stager.evictor import victims
from forebay.stager.manifest import Shard
from forebay.stager.plan import NEVER, Plan, PlanBook
from forebay.tiers.store import ObjectInfo


def shard(name: str, size_bytes: int = 10) -> Shard:
    return Shard(0, "s3://b", ObjectInfo(name, size_bytes, "v"), name)


def held(name: str, used_at: float = 0.0, blocks: int = 10) -> Held:
    return Held(name, blocks, blocks, "", "", used_at)


def plan(names: str, window: int = 1) -> Plan:
    return Plan("d", [shard(name) for name in names], window)


def test_next_use_counts_bytes_from_the_position():
    found = plan("abcab")
    assert [found.next_use_bytes(name) for name in "abc"] == [0, 10, 20]
    assert found.next_use_bytes("z") == NEVER
    found.advance(2)
    assert [found.next_use_bytes(name) for name in "abc"] == [10, 20, 0]


def test_a_shard_being_asked_for_is_its_own_next_use():
    """Between `Advance` and the lease it was the furthest of all, and was evicted: 2 x the fetches."""
    found = plan("abcabc")
    found.advance(1)
    assert found.next_use_bytes("b") == 0


@given(st.text("abcdef", min_size=1, max_size=30), st.data())
def test_next_use_is_what_a_search_finds(names, data):
    found = plan(names)
    position = data.draw(st.integers(0, len(names) - 1))
    found.advance(position)
    for name in "abcdef":
        at = names.find(name, position)
        assert found.next_use_bytes(name) == (NEVER if at < 0 else (at - position) * 10)


def test_furthest_next_use_goes_first_then_least_recent():
    next_use = {"soon": 5.0, "late": 50.0, "never-old": NEVER, "never-new": NEVER}
    candidates = [held("soon"), held("late"), held("never-new", used_at=2), held("never-old", used_at=1)]
    chosen = victims(candidates, 30, next_use.__getitem__, 5.0)
    assert [item.id for item in chosen or ()] == ["never-old", "never-new", "late"]


@given(
    st.dictionaries(st.text("xyz", min_size=1, max_size=3), st.integers(0, 100), max_size=12),
    st.integers(0, 100),
    st.integers(1, 100),
)
def test_what_comes_next_never_pushes_out_what_comes_sooner(uses, incoming, need):
    candidates = [held(name) for name in uses]
    chosen = victims(candidates, need, lambda name: uses[name], incoming)
    if chosen is None:
        assert sum(10 for use in uses.values() if use > incoming) < need
    else:
        assert all(uses[item.id] > incoming for item in chosen)
        assert sum(item.blocks_bytes for item in chosen) >= need
        kept = set(uses) - {item.id for item in chosen}
        assert all(uses[a] <= min(uses[b.id] for b in chosen) for a in kept) if chosen else True


def test_plans_of_several_sessions_count_the_nearest_use():
    book = PlanBook()
    book.set(1, plan("ab"))
    book.set(2, plan("ba"))
    assert book.next_use_bytes("a") == 0 == book.next_use_bytes("b")
    book.drop(1)
    assert book.next_use_bytes("a") == 10


def test_working_set_counts_one_dataset_once():
    book = PlanBook()
    book.set(1, plan("abcd", window=2))
    assert book.working_set_bytes(2, plan("abcd", window=3)) == 30
    other = Plan("other", [shard("x"), shard("y")], 2)
    assert book.working_set_bytes(2, other) == 40
