"""A stage job as the scheduler sees it: shards taken one by one, when nothing stronger wants the source."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import anyio
import numpy as np
import numpy.typing as npt

from forebay.core.errors import ForebayError
from forebay.stager.manifest import Manifest, Shard
from forebay.tiers.budget import Class


class BulkStream:
    """`rank` says how urgent the next shard is, `finished` hears of each with its error, if any."""

    def __init__(
        self,
        manifest: Manifest,
        numbers: npt.NDArray[np.int64],
        tenant: str,
        rank: Callable[[], tuple[Class, float]],
        taken: Callable[[Shard], None],
        finished: Callable[[Shard, ForebayError | None], None],
    ) -> None:
        self.tenant = tenant
        self.rank = rank
        self.done = anyio.Event()
        self._taken = taken
        self._finished = finished
        self._left = len(numbers)
        self._shards: Iterator[Shard] = manifest.shards(numbers)
        self.head: Shard | None = None
        self._blocked_at: float | None = None
        self._next()

    def take(self) -> Shard:
        """The head is being fetched, or somebody fetches it already."""
        assert self.head is not None
        shard = self.head
        self._taken(shard)
        self._next()
        return shard

    def _next(self) -> None:
        self.head = next(self._shards, None)
        self._blocked_at = None

    def blocked_s(self) -> float:
        """There is no room for the head; for how long that has been so."""
        now = time.monotonic()
        if self._blocked_at is None:
            self._blocked_at = now
        return now - self._blocked_at

    def finish(self, shard: Shard, error: ForebayError | None) -> None:
        self._left -= 1
        self._finished(shard, error)
        if not self._left:
            self.done.set()
