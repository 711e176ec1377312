"""The global sample order: a pure function of (shards, seed, epoch), and each rank's slice of it.

Shards are permuted, then cut into blocks of `block_shards`; samples are shuffled inside a block, so
that a block is all that must be near at a time. A batch of the job is the next `global_batch`
samples of that one sequence; rank r takes the r-th slice of it. Hence (DESIGN, section 5):

L1  every rank yields the same number of batches;
L2  each sample comes once per epoch (a last, short batch is padded or dropped: `slice_for_rank`);
L3  the sequence does not depend on ranks, threads, timing or cache;
L4  a position is (block, offset): resuming reads nothing before it;
L5  only raw output of PCG64 seeded by SeedSequence is used, which NumPy keeps stable for ever
    (https://numpy.org/doc/stable/reference/random/compatibility.html).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cursor:
    """A position in an epoch: `offset` samples into `block`, `samples` since the start.

    Of a mixture: into a turn, and where each dataset stood when that began: (round, block, offset, samples).
    """

    block: int = 0
    offset: int = 0
    samples: int = 0
    parts: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(frozen=True)
class GlobalBatch:
    """Rows of (shard, sample), in order, and the position behind them."""

    rows: Ints
    after: Cursor


class Opener(Protocol):
    """Has shards brought and opened, as a walk comes to them."""

    def plan(self, shards: Ints, window: int) -> None:
        """In this order, `window` of them at a time; instead of what was planned of their dataset before."""
        ...

    def open(self, place: int, shards: Ints, pending: Ints) -> list[int]:
        """How many samples each has. `place`: of the first in the plan; `pending`: rows of shards opened
        before that nobody has taken yet."""
        ...


class Walk(ABC):
    """One pass: rows of (shard, sample), as many at a time as wanted. Nothing is known of later shards.

    `_rows`: those that nobody has taken yet, `_samples` those that were, since the epoch began.
    """

    def __init__(self, start: Cursor) -> None:
        self._rows = no_rows()
        self._samples = start.samples

    def take(self, wanted: int) -> Ints:
        """Fewer at the end."""
        while len(self._rows) < wanted and self._more():
            pass
        taken, self._rows = self._rows[:wanted], self._rows[wanted:]
        self._samples += len(taken)
        return taken

    @abstractmethod
    def _more(self) -> bool:
        """Adds to the rows, if only none; False at the end."""

    @property
    def pending(self) -> Ints:
        """Rows of shards that are open, and that nobody has taken yet."""
        return self._rows

    @property
    @abstractmethod
    def cursor(self) -> Cursor:
        """Behind what was taken."""

    def batches(self, global_batch: int, *, drop_last: bool) -> Iterator[GlobalBatch]:
        while True:
            rows = self.take(global_batch)
            if len(rows) == global_batch or (len(rows) and not drop_last):
                yield GlobalBatch(rows, self.cursor)
            if len(rows) < global_batch:
                return


def count_batches(samples: int, global_batch: int, *, drop_last: bool) -> int:
    whole, rest = divmod(samples, global_batch)
    return whole + (1 if rest and not drop_last else 0)


@dataclass(frozen=True)
class Order:
    """`block_shards` is 1 when nothing is shuffled."""

    shards: int
    shuffle: bool
    seed: int
    block_shards: int

    def sequence(self, epoch: int) -> Ints:
        """The shards in order of use."""
        if not self.shuffle:
            return np.arange(self.shards, dtype=np.int64)
        return _permutation(self.shards, self.seed, epoch, 0)

    def blocks(self, epoch: int) -> list[Ints]:
        sequence = self.sequence(epoch)
        return [sequence[i : i + self.block_shards] for i in range(0, self.shards, self.block_shards)]

    def samples_of(self, epoch: int, block: int, shards: Ints, counts: list[int]) -> Ints:
        """All (shard, sample) rows of a block in order of use; `counts` are its shards' samples."""
        rows = np.concatenate(
            [no_rows()]
            + [
                np.stack([np.full(count, shard, dtype=np.int64), np.arange(count, dtype=np.int64)], axis=1)
                for shard, count in zip(shards, counts, strict=True)
            ]
        )
        if not self.shuffle:
            return rows
        return rows[_permutation(len(rows), self.seed, epoch, block + 1)]

    def walk(self, epoch: int, start: Cursor, opener: Opener) -> Walk:
        """What an epoch yields from `start` on."""
        return _BlockWalk(self, epoch, start, opener)

    @property
    def window(self) -> int:
        """Shards that are open at once, or about to be."""
        return min(2 * self.block_shards, self.shards)

    def count_samples(self, epoch: int, counts: Sequence[int]) -> int:
        return sum(counts)

    def describe(self) -> str:
        if not self.shuffle:
            return "as the source lists them"
        return f"seed {self.seed}, samples of {self.block_shards} shards mixed"


class _BlockWalk(Walk):
    def __init__(self, order: Order, epoch: int, start: Cursor, opener: Opener) -> None:
        super().__init__(start)
        self._order = order
        self._epoch = epoch
        self._opener = opener
        self._blocks = order.blocks(epoch)
        self._first = self._next = start.block
        self._skip = start.offset
        self._block_rows = 0
        opener.plan(np.concatenate([*self._blocks[self._first :], order.sequence(epoch + 1)]), order.window)

    def _more(self) -> bool:
        if self._next == len(self._blocks):
            return False
        block, shards = self._next, self._blocks[self._next]
        place = (block - self._first) * self._order.block_shards
        counts = self._opener.open(place, shards, self._rows)
        fresh = self._order.samples_of(self._epoch, block, shards, counts)
        self._block_rows = len(fresh)
        self._rows = np.concatenate([self._rows, fresh[self._skip :]])
        self._skip = 0
        self._next += 1
        return True

    @property
    def cursor(self) -> Cursor:
        """A block is opened for rows that reach into it: what is left is all of one block."""
        if self._next == self._first:
            return Cursor(self._first, self._skip, self._samples)
        return Cursor(self._next - 1, self._block_rows - len(self._rows), self._samples)


def no_rows() -> Ints:
    return np.empty((0, 2), dtype=np.int64)


def slice_for_rank(rows: Ints, rank: int, world_size: int) -> tuple[Ints, int]:
    """This rank's part of a global batch, and how many of its rows repeat others to even it out."""
    each = -(-len(rows) // world_size)
    wanted = np.arange(rank * each, (rank + 1) * each)
    return rows[wanted % len(rows)], int(np.count_nonzero(wanted >= len(rows)))


def _permutation(length: int, seed: int, epoch: int, stream: int) -> Ints:
    return np.argsort(raw_numbers(length, seed, epoch, stream), kind="stable").astype(np.int64)


def raw_numbers(length: int, seed: int, *stream: int) -> npt.NDArray[np.uint64]:
    """Uniform over 64 bits; the same for ever."""
    drawn: npt.NDArray[np.uint64] = np.random.PCG64(np.random.SeedSequence([seed, *stream])).random_raw(
        length
    )
    return drawn
