"""The order of a mixture: turns of a few hundred samples, in each of which every dataset has its share.

Which dataset the i-th sample comes from depends on seed, epoch, weights and i alone; each dataset is walked
in its own order. So L1 to L5 (`loaders.order`) hold for the mixture as for one dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np

from forebay.core.errors import EmptyDataset
from forebay.loaders.order import Cursor, Ints, Opener, Order, Walk, raw_numbers

Until = Literal["first", "all"] | int

TURN = 256
# Streams below are those of the datasets' own blocks.
_STREAM = 1 << 40
# Of a dataset that comes round again within one epoch of the mixture.
_ROUNDS = 1 << 20


@dataclass(frozen=True)
class MixedOrder:
    """Shards of the k-th dataset are numbered from `bases[k]` on."""

    parts: tuple[Order, ...]
    weights: tuple[float, ...]
    until: Until
    seed: int
    shuffle: bool

    @property
    def shards(self) -> int:
        return sum(part.shards for part in self.parts)

    @property
    def block_shards(self) -> int:
        return max(part.block_shards for part in self.parts)

    @property
    def window(self) -> int:
        return sum(part.window for part in self.parts)

    @property
    def bases(self) -> list[int]:
        return bases_of(part.shards for part in self.parts)

    def walk(self, epoch: int, start: Cursor, opener: Opener) -> Walk:
        return _MixedWalk(self, epoch, start, opener)

    def choices(self, epoch: int, turn: int) -> Ints:
        """The datasets that the samples of a turn come from."""
        total, steps = sum(self.weights), np.cumsum(self.weights[:-1])
        bounds = np.array([int(step / total * 2**53) for step in steps], dtype=np.uint64)
        drawn = raw_numbers(TURN, self.seed, epoch, _STREAM + turn) >> np.uint64(11)
        return np.searchsorted(bounds, drawn, side="right").astype(np.int64)

    def count_samples(self, epoch: int, counts: Sequence[int]) -> int:
        """Samples of a pass, from those of each shard."""
        if isinstance(self.until, int):
            return self.until
        left = [sum(counts[base : base + part.shards])
                for base, part in zip(self.bases, self.parts, strict=True)]  # fmt: skip
        whole, ended, samples, turn = list(left), set[int](), 0, 0
        while True:
            ends = []
            choices = self.choices(epoch, turn)
            for part in range(len(self.parts)):
                places = np.flatnonzero(choices == part)
                if len(places) > left[part]:
                    ends.append((part, int(places[left[part]])))
                left[part] -= len(places)
                if left[part] < 0:
                    left[part] %= max(1, whole[part])
            found = _end(self.until, ended, ends, len(self.parts))
            if found is not None:
                return samples + found
            samples, turn = samples + TURN, turn + 1

    def describe(self) -> str:
        shares = ", ".join(f"{weight / sum(self.weights):.1%}" for weight in self.weights)
        return f"seed {self.seed}, {len(self.parts)} datasets in shares of {shares}, until {self.until}"


def bases_of(shards: Iterable[int]) -> list[int]:
    """The number of each dataset's first shard, when all are numbered through."""
    return [0, *accumulate(shards)][:-1]


def _end(until: Until, ended: set[int], ends: list[tuple[int, int]], parts: int) -> int | None:
    """Where in this turn the pass ends, if it does. `ends`: datasets that ran out, and at which place."""
    if until == "first":
        return min((place for _, place in ends), default=None)
    new = [(part, place) for part, place in ends if part not in ended]
    ended.update(part for part, _ in new)
    return max((place for _, place in new), default=None) if len(ended) == parts else None


class _MixedWalk(Walk):
    def __init__(self, order: MixedOrder, epoch: int, start: Cursor, opener: Opener) -> None:
        super().__init__(start)
        self._order = order
        self._bases = order.bases
        self._epoch = epoch
        self._opener = opener
        self._start = start
        self._turn = start.block
        self._skip = start.offset
        self._drawn = list[Ints]()
        self._turn_rows = 0
        self._over = False
        states = start.parts or ((0, 0, 0, 0),) * len(order.parts)
        self._rounds = [state[0] for state in states]
        # What is in a later round has ended once.
        self._ended = {part for part, found in enumerate(self._rounds) if found}
        self._walks = list[Walk]()
        for part, state in enumerate(states):
            self._walks.append(self._walk(part, Cursor(*state[1:])))
        self._before = self._states()

    @property
    def pending(self) -> Ints:
        parts = [self._numbered(part, walk.pending) for part, walk in enumerate(self._walks)]
        return np.concatenate([self._rows, *self._drawn, *parts])

    @property
    def cursor(self) -> Cursor:
        """A turn is drawn for rows that reach into it: what is left is all of one turn."""
        if self._turn == self._start.block:
            return Cursor(self._turn, self._start.offset, self._samples, self._before)
        return Cursor(self._turn - 1, self._turn_rows - len(self._rows), self._samples, self._before)

    def _more(self) -> bool:
        """Draws a turn."""
        if self._over:
            return False
        self._before = self._states()
        choices = self._order.choices(self._epoch, self._turn)
        rows = np.zeros((TURN, 2), dtype=np.int64)
        ends = list[tuple[int, int]]()
        for part in range(len(self._walks)):
            places = np.flatnonzero(choices == part)
            taken, end = self._take(part, len(places))
            rows[places[: len(taken)]] = taken
            if end is not None:
                ends.append((part, int(places[end])))
        cut = self._cut(ends)
        if cut is not None:
            rows, self._over = rows[:cut], True
        self._turn_rows = len(rows)
        self._rows = np.concatenate([self._rows, rows[self._skip :]])
        self._skip = 0
        self._drawn.clear()
        self._turn += 1
        return True

    def _take(self, part: int, wanted: int) -> tuple[Ints, int | None]:
        """Rows of one dataset, and after how many of them it came to its end, if it did."""
        taken = self._drawn_from(part, wanted)
        end = len(taken) if len(taken) < wanted else None
        while len(taken) < wanted and self._order.until != "first":
            self._rounds[part] += 1
            self._walks[part] = self._walk(part, Cursor())
            more = self._drawn_from(part, wanted - len(taken))
            if not len(more):
                raise EmptyDataset(f"dataset {part} of the mixture has no samples")
            taken = np.concatenate([taken, more])
        return taken, end

    def _drawn_from(self, part: int, wanted: int) -> Ints:
        """Pending until the turn is made up."""
        taken = self._numbered(part, self._walks[part].take(wanted))
        self._drawn.append(taken)
        return taken

    def _numbered(self, part: int, rows: Ints) -> Ints:
        numbered: Ints = rows + np.array([self._bases[part], 0])
        return numbered

    def _cut(self, ends: list[tuple[int, int]]) -> int | None:
        if isinstance(self._order.until, int):
            left = self._order.until - self._turn * TURN
            return left if left < TURN else None
        return _end(self._order.until, self._ended, ends, len(self._walks))

    def _walk(self, part: int, start: Cursor) -> Walk:
        opener = _PartOpener(self._opener, self._bases[part], self)
        return self._order.parts[part].walk(self._epoch * _ROUNDS + self._rounds[part], start, opener)

    def _states(self) -> tuple[tuple[int, int, int, int], ...]:
        found = [(round, walk.cursor) for round, walk in zip(self._rounds, self._walks, strict=True)]
        return tuple((round, at.block, at.offset, at.samples) for round, at in found)


class _PartOpener:
    """Numbers a dataset's shards as the mixture does."""

    def __init__(self, opener: Opener, base: int, mixed: _MixedWalk) -> None:
        self._opener = opener
        self._base = base
        self._mixed = mixed

    def plan(self, shards: Ints, window: int) -> None:
        self._opener.plan(shards + self._base, window)

    def open(self, place: int, shards: Ints, pending: Ints) -> list[int]:
        return self._opener.open(place, shards + self._base, self._mixed.pending)
