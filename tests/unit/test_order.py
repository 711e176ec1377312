"""L1 to L5 of DESIGN, attacked with random shards, ranks and positions."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.loaders.order import Cursor, GlobalBatch, Ints, Order, count_batches, slice_for_rank
from forebay.loaders.source import Sequencing

counts = st.lists(st.integers(0, 40), min_size=1, max_size=12)
orders = st.tuples(st.booleans(), st.integers(0, 2**31), st.integers(1, 5))


def order_of(samples: list[int], spec: tuple[bool, int, int]) -> Order:
    shuffle, seed, block_shards = spec
    return Order(len(samples), shuffle, seed, block_shards if shuffle else 1)


class Opened:
    """Shards with so many samples; checks that what is pending was opened and is not past."""

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples
        self.opened: list[list[int]] = []
        self.open_now: set[int] = set()
        self.planned: list[list[int]] = []

    def plan(self, shards: Ints, window: int) -> None:
        assert window >= 1
        self.planned.append(shards.tolist())

    def open(self, place: int, shards: Ints, pending: Ints) -> list[int]:
        numbers = shards.tolist()
        assert any(plan[place : place + len(numbers)] == numbers for plan in self.planned)
        kept = set(pending[:, 0].tolist())
        assert kept <= self.open_now
        self.open_now = kept | set(numbers)
        self.opened.append(numbers)
        return [self.samples[shard] for shard in numbers]


def run(
    order: Sequencing,
    samples: list[int],
    epoch: int,
    global_batch: int,
    start: Cursor = Cursor(),  # noqa: B008 - frozen
    drop_last: bool = False,
) -> list[GlobalBatch]:
    walk = order.walk(epoch, start, Opened(samples))
    return list(walk.batches(global_batch, drop_last=drop_last))


@given(counts, orders, st.integers(0, 3), st.integers(1, 6), st.integers(1, 7), st.booleans())
def test_every_rank_gets_the_same_number_of_batches(samples, spec, epoch, world, batch, drop_last):
    """L1: by construction, fewer shards than ranks included (F15)."""
    batches = run(order_of(samples, spec), samples, epoch, world * batch, drop_last=drop_last)
    for found in batches:
        lengths = {len(slice_for_rank(found.rows, rank, world)[0]) for rank in range(world)}
        assert len(lengths) == 1 and lengths != {0}


@given(counts, orders, st.integers(0, 3), st.integers(1, 6), st.integers(1, 7))
def test_each_sample_once_and_padding_is_counted(samples, spec, epoch, world, batch):
    """L2: the union of all slices is the epoch; what is more is what `padded` says."""
    seen: Counter[tuple[int, int]] = Counter()
    padded = 0
    for found in run(order_of(samples, spec), samples, epoch, world * batch):
        for rank in range(world):
            rows, repeats = slice_for_rank(found.rows, rank, world)
            padded += repeats
            seen.update(map(tuple, rows.tolist()))
    expected = {(shard, sample) for shard, count in enumerate(samples) for sample in range(count)}
    assert set(seen) == expected
    assert seen.total() - len(expected) == padded


@given(counts, orders, st.integers(1, 6), st.integers(1, 7))
def test_drop_last_drops_less_than_one_batch(samples, spec, world, batch):
    order = order_of(samples, spec)
    kept = sum(len(found.rows) for found in run(order, samples, 0, world * batch, drop_last=True))
    assert 0 <= sum(samples) - kept < world * batch
    number = count_batches(sum(samples), world * batch, drop_last=True)
    assert number == len(run(order, samples, 0, world * batch, drop_last=True))


@given(counts, orders, st.integers(0, 3), st.integers(1, 12), st.integers(1, 12))
def test_the_sequence_does_not_depend_on_the_batch(samples, spec, epoch, one, other):
    """L3: ranks and batch size only cut one and the same sequence."""
    order = order_of(samples, spec)

    def flat(size: int) -> list[list[int]]:
        return [row for found in run(order, samples, epoch, size) for row in found.rows.tolist()]

    assert flat(one) == flat(other)


@given(counts, orders, st.integers(1, 9), st.integers(1, 9), st.data())
def test_resume_is_exact_with_another_batch_size(samples, spec, one, other, data):
    """L4: what was not seen yet, in the same order, whatever the world size is now."""
    order = order_of(samples, spec)
    batches = run(order, samples, 1, one)
    stop = data.draw(st.integers(0, len(batches)))
    seen = [row for found in batches[:stop] for row in found.rows.tolist()]
    cursor = batches[stop - 1].after if stop else Cursor()
    assert cursor.samples == len(seen)
    rest = [row for found in run(order, samples, 1, other, cursor) for row in found.rows.tolist()]
    whole = [row for found in run(order, samples, 1, one) for row in found.rows.tolist()]
    assert seen + rest == whole


def test_resume_opens_no_block_before_its_position():
    """L4: O(1), not a replay."""
    order = Order(100, True, 3, 4)
    opener = Opened([10] * 100)
    next(iter(order.walk(0, Cursor(20, 5, 805), opener).batches(8, drop_last=False)))
    assert opener.opened == [order.blocks(0)[20].tolist()]


def test_same_seed_same_order_for_ever():
    """L5: pinned values; another NumPy, machine or year must not change them."""
    order = Order(6, True, 42, 2)
    assert order.sequence(0).tolist() == [4, 1, 3, 0, 2, 5]
    assert order.sequence(1).tolist() != order.sequence(0).tolist()
    rows = order.samples_of(0, 0, np.array([3, 1]), [2, 2])
    assert rows.tolist() == [[1, 0], [3, 0], [3, 1], [1, 1]]


def test_unshuffled_is_the_order_of_the_shards():
    samples = [2, 0, 1]
    rows = [
        row for found in run(order_of(samples, (False, 9, 4)), samples, 5, 2) for row in found.rows.tolist()
    ]
    assert rows == [[0, 0], [0, 1], [2, 0]]
