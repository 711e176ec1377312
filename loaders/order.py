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

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cursor:
    """A position in an epoch: `offset` samples into `block`, `samples` since the start."""

    block: int = 0
    offset: int = 0
    samples: int = 0


@dataclass(frozen=True)
class GlobalBatch:
    """Rows of (shard, sample), in order, and the position behind them."""

    rows: Ints
    after: Cursor


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
            [np.empty((0, 2), dtype=np.int64)]
            + [
                np.stack([np.full(count, shard, dtype=np.int64), np.arange(count, dtype=np.int64)], axis=1)
                for shard, count in zip(shards, counts, strict=True)
            ]
        )
        if not self.shuffle:
            return rows
        return rows[_permutation(len(rows), self.seed, epoch, block + 1)]

    def batches(
        self,
        epoch: int,
        global_batch: int,
        start: Cursor,
        open_block: Callable[[int, Ints, Ints], list[int]],
        *,
        drop_last: bool,
    ) -> Iterator[GlobalBatch]:
        """Global batches from `start` on.

        `open_block(block, shards, pending)` is called when a block comes into use, and returns its
        counts: nothing needs to be known about later blocks. `pending` are the rows of earlier blocks
        that no batch has taken yet.
        """
        rows = np.empty((0, 2), dtype=np.int64)
        samples = start.samples
        blocks = self.blocks(epoch)
        for block in range(start.block, len(blocks)):
            fresh = self.samples_of(epoch, block, blocks[block], open_block(block, blocks[block], rows))
            offset = start.offset if block == start.block else 0
            before = len(rows)
            rows = np.concatenate([rows, fresh[offset:]])
            taken = 0
            while len(rows) - taken >= global_batch:
                batch, taken = rows[taken : taken + global_batch], taken + global_batch
                samples += global_batch
                yield GlobalBatch(batch, Cursor(block, offset + taken - before, samples))
            rows = rows[taken:]
        if len(rows) and not drop_last:
            yield GlobalBatch(rows, Cursor(len(blocks), 0, samples + len(rows)))

    def count_batches(self, total_samples: int, global_batch: int, *, drop_last: bool) -> int:
        whole, rest = divmod(total_samples, global_batch)
        return whole + (1 if rest and not drop_last else 0)


def slice_for_rank(rows: Ints, rank: int, world_size: int) -> tuple[Ints, int]:
    """This rank's part of a global batch, and how many of its rows repeat others to even it out."""
    each = -(-len(rows) // world_size)
    wanted = np.arange(rank * each, (rank + 1) * each)
    return rows[wanted % len(rows)], int(np.count_nonzero(wanted >= len(rows)))


def _permutation(length: int, seed: int, epoch: int, stream: int) -> Ints:
    source = np.random.PCG64(np.random.SeedSequence([seed, epoch, stream]))
    return np.argsort(source.random_raw(length), kind="stable").astype(np.int64)
