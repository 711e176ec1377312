"""C5 for any mixture of checkpoints, rules and pins."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from forebay.checkpointd.commit import Found
from forebay.checkpointd.layout import Commit
from forebay.checkpointd.retention import stays
from forebay.core.protocol import About, Keep

NOW = 1000.0


def found(step: int, loss: float | None = None, age_s: float = 0.0, pinned: bool = False) -> Found:
    about = About(metrics={} if loss is None else {"loss": loss})
    commit = Commit("run", step, f"a{step}", 1, [], NOW - age_s, about)
    return Found(step, commit.attempt, commit, None, frozenset(), pinned)


def steps(checkpoints: list[Found], keep: Keep) -> list[int]:
    return sorted(step for step, _ in stays(checkpoints, keep, NOW))


def test_each_rule_keeps_some_and_the_newest_always_stays():
    losses = {10: 0.5, 20: math.nan, 30: 0.3, 40: 0.9, 50: None, 60: 0.8}
    run = [found(step, losses[step], age_s=100 - step) for step in sorted(losses, reverse=True)]
    assert steps(run, Keep()) == [10, 20, 30, 40, 50, 60]
    assert steps(run, Keep(last=2)) == [50, 60]
    assert steps(run, Keep(every=20)) == [20, 40, 60]
    assert steps(run, Keep(best=2, metric="loss")) == [10, 30, 60]
    assert steps(run, Keep(best=1, metric="loss", mode="max")) == [40, 60]
    assert steps(run, Keep(age_s=45)) == [60]
    assert steps(run, Keep(last=1, every=30, best=1, metric="loss")) == [30, 60]
    assert steps([], Keep(last=1)) == []


numbers = st.none() | st.integers(0, 5)
checkpoints = st.lists(
    st.tuples(st.integers(0, 40), st.none() | st.floats(), st.floats(0, 100), st.booleans()),
    max_size=12,
    unique_by=lambda item: item[0],
)


@given(checkpoints, numbers, st.none() | st.integers(1, 5), numbers, st.none() | st.floats(0, 100))
def test_never_the_newest_never_a_pinned_one(
    items: list[tuple[int, float | None, float, bool]],
    last: int | None,
    every: int | None,
    best: int | None,
    age_s: float | None,
):
    run = [found(*item) for item in sorted(items, key=lambda item: -item[0])]
    keep = Keep(last, every, best, "loss", "min", age_s)
    left = stays(run, keep, NOW)
    assert left <= {(at.step, at.attempt) for at in run}
    assert {(at.step, at.attempt) for at in run if at.pinned or at is run[0]} <= left
    assert stays([at for at in run if (at.step, at.attempt) in left], keep, NOW) == left
    if keep == Keep(metric="loss"):
        assert len(left) == len(run)
