"""L1 to L5 for mixtures of several datasets, attacked with random sizes, weights and positions."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.errors import EmptyDataset
from forebay.loaders.batch import Cut, SampleReader
from forebay.loaders.mixing.order import TURN, MixedOrder, Until
from forebay.loaders.order import Cursor, Order, count_batches
from tests.unit.test_order import Opened, run

datasets = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(sum), min_size=1, max_size=4)
weights = st.lists(st.floats(0.05, 20), min_size=4, max_size=4)
untils = st.one_of(st.sampled_from(["first", "all"]), st.integers(1, 2000))


def mixed(parts: list[list[int]], shares: list[float], until: Until, seed: int = 3) -> MixedOrder:
    orders = tuple(Order(len(part), True, seed + place, 2) for place, part in enumerate(parts))
    return MixedOrder(orders, tuple(shares[: len(parts)]), until, seed, True)


def flat(parts: list[list[int]]) -> list[int]:
    return [count for part in parts for count in part]


@settings(max_examples=60)
@given(datasets, weights, untils, st.integers(0, 3), st.integers(1, 300), st.integers(1, 300))
def test_the_sequence_and_its_length_do_not_depend_on_the_batch(parts, shares, until, epoch, one, other):
    """L1 and L3."""
    order, counts = mixed(parts, shares, until), flat(parts)
    rows = [[row for found in run(order, counts, epoch, size) for row in found.rows.tolist()]
            for size in (one, other)]  # fmt: skip
    assert rows[0] == rows[1]
    assert len(rows[0]) == order.count_samples(epoch, counts)
    whole = run(order, counts, epoch, one, drop_last=True)
    assert len(whole) == count_batches(len(rows[0]), one, drop_last=True)


@settings(max_examples=60)
@given(datasets, weights, untils, st.integers(1, 90), st.integers(1, 90), st.data())
def test_resume_is_exact_with_another_batch_size(parts, shares, until, one, other, data):
    """L4."""
    order, counts = mixed(parts, shares, until), flat(parts)
    batches = run(order, counts, 1, one)
    stop = data.draw(st.integers(0, len(batches)))
    seen = [row for found in batches[:stop] for row in found.rows.tolist()]
    cursor = batches[stop - 1].after if stop else Cursor()
    rest = [row for found in run(order, counts, 1, other, cursor) for row in found.rows.tolist()]
    assert seen + rest == [row for found in batches for row in found.rows.tolist()]


@settings(max_examples=60)
@given(datasets, weights)
def test_first_ends_before_anything_repeats_and_all_after_all_have_come(parts, shares):
    """L2, for what a mixture promises of it."""
    counts = flat(parts)
    everything = {(shard, sample) for shard, count in enumerate(counts) for sample in range(count)}
    first = Counter(tuple(row) for found in run(mixed(parts, shares, "first"), counts, 0, 7)
                    for row in found.rows.tolist())  # fmt: skip
    assert set(first.values()) <= {1} and set(first) <= everything
    through = Counter(tuple(row) for found in run(mixed(parts, shares, "all"), counts, 0, 7)
                      for row in found.rows.tolist())  # fmt: skip
    assert set(through) == everything
    bases = np.cumsum([0, *map(len, parts)])
    for low, high in itertools.pairwise(bases):
        times = {through[key] for key in everything if low <= key[0] < high}
        assert max(times) - min(times) <= 1


def test_a_turn_without_a_dataset_does_not_use_it_up():
    """It was counted as ended then: `len()` and the pass differed."""
    order = mixed([[1], [1]], [17.0, 0.125], "all")
    assert sum(len(found.rows) for found in run(order, [1, 1], 1, 1)) == order.count_samples(1, [1, 1]) == 511


def test_shares_are_those_of_the_weights():
    order = mixed([[10_000], [10_000], [10_000]], [6, 3, 1], 8_000)
    rows = np.concatenate([found.rows for found in run(order, [10_000] * 3, 0, 100)])
    shares = np.bincount(rows[:, 0]) / len(rows)
    assert np.abs(shares - [0.6, 0.3, 0.1]).max() < 0.02


def test_only_what_is_used_stays_open_and_resume_opens_nothing_before():
    parts = [[50] * 40, [50] * 40]
    order = mixed(parts, [1, 1], "first")
    opener = Opened(flat(parts))
    most = 0
    after = Cursor()
    for batch in order.walk(0, Cursor(), opener).batches(64, drop_last=True):
        most = max(most, len(opener.open_now))
        after = batch.after
    # A turn of 128 samples each reaches into three blocks of 100.
    assert most <= 2 * 3 * 2
    late = Opened(flat(parts))
    next(iter(order.walk(0, after, late).batches(1, drop_last=False)), None)
    assert len(late.opened) <= 4


def test_epochs_and_rounds_differ():
    order = mixed([[300], [30]], [1, 1], 1000)
    one, other = (
        [row for found in run(order, [300, 30], epoch, 50) for row in found.rows.tolist()] for epoch in (0, 1)
    )
    assert one != other
    small = [sample for shard, sample in one if shard == 1]
    assert sorted(small[:30]) == sorted(small[30:60]) == list(range(30)) and small[:30] != small[30:60]


def test_same_seed_same_choices_for_ever():
    """L5: pinned."""
    choices = mixed([[1], [1]], [3, 1], "first", seed=42).choices(0, 5)
    assert len(choices) == TURN and choices[:16].tolist() == [0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1]


def test_a_dataset_without_samples_is_named():
    with pytest.raises(EmptyDataset, match="dataset 1 of the mixture"):
        run(mixed([[5], [0]], [1, 1], "all"), [5, 0], 0, 2)


@dataclass
class Doubled:
    """As any class with a comparison of its own, it has no hash."""

    def __call__(self, value: bytes) -> bytes:
        return value * 2


def test_a_decoder_may_be_any_callable():
    cuts = [Cut((("x", Doubled()),), None)] * 2
    assert SampleReader(cuts, "raise").failed == 0
