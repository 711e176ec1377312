"""What makes a batch of rows."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from forebay.loaders.batch import SampleReader, Shards
from forebay.loaders.order import Ints
from forebay.loaders.pool import BatchPool
from forebay.loaders.source import Session

log = logging.getLogger("forebay.loaders")

Collate = Callable[[Sequence[tuple[Any, ...]]], Any]


class BatchMaker(Protocol):
    """Used by several threads at once."""

    @property
    def failed(self) -> int:
        """Samples that `on_error` left out or replaced."""
        ...

    def begin(self) -> None:
        """A pass begins."""
        ...

    def enter_thread(self) -> None:
        """Called in each of the threads, first."""
        ...

    def make(self, session: Session, rows: Ints, shards: Shards) -> Any:
        """`shards`: those that the rows are of; none where each shard is one sample."""
        ...

    def forget(self, shards: Iterable[int]) -> None:
        """The order is past these."""
        ...

    def abandon(self) -> None:
        """Nobody wants the batches under way, and they do not end by themselves."""
        ...

    def close(self) -> None: ...


class InThreads:
    """The threads that ask do the work, on `cpus` if any are given."""

    def __init__(
        self,
        reader: SampleReader,
        collate: Collate | None,
        pool: BatchPool,
        cpus: frozenset[int] = frozenset(),
    ) -> None:
        self._cpus = cpus
        self._reader = reader
        self._collate = collate
        self._pool = pool

    @property
    def failed(self) -> int:
        return self._reader.failed

    def begin(self) -> None:
        return

    def enter_thread(self) -> None:
        self._pool.enter_thread()
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)

    def make(self, session: Session, rows: Ints, shards: Shards) -> Any:
        if shards:
            return self._batch(rows, shards)
        with ExitStack() as leased:
            alone = {}
            for number in set(rows[:, 0].tolist()):
                alone[number] = session.need(number)
                leased.callback(alone[number].release)
            return self._batch(rows, alone)

    def forget(self, shards: Iterable[int]) -> None:
        return

    def abandon(self) -> None:
        log.warning("a decoder or transform does not end; a thread cannot be ended from outside")

    def close(self) -> None:
        return

    def _batch(self, rows: Ints, shards: Shards) -> Any:
        if self._collate is None:
            return self._reader.batch(rows, shards, self._pool)
        return self._collate(self._reader.samples(rows, shards))
