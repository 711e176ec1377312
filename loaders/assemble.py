"""Batches from mapped shards, in order.

A feeder thread walks the order, opens blocks of shards and hands rows to a pool of threads, which have
batches made of them; the consumer takes them in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.core.protocol import Runway
from forebay.loaders.order import Cursor, GlobalBatch, Ints, Order, slice_for_rank
from forebay.loaders.pacing.monitor import Held
from forebay.loaders.ready import ReadyQueue
from forebay.loaders.session import MappedShard, StagerSession
from forebay.loaders.workers import BatchMaker

_END_S = 5.0


@dataclass(frozen=True)
class EpochRun:
    """One pass: what to read from where on."""

    order: Order
    epoch: int
    start: Cursor
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool


@dataclass(frozen=True)
class Ready:
    """A batch under way, and what the loader's state will be once it has been taken.

    `source_bytes`: its share of the shards that it is cut from.
    """

    batch: Future[Any]
    after: Cursor
    samples: int
    padded: int
    source_bytes: int


class _OpenShards:
    """Shards in use, each released when the feeder and every batch cut from it are done with it."""

    def __init__(self, forget: Callable[[list[int]], None]) -> None:
        self._forget = forget
        self._lock = threading.Lock()
        self._users: dict[int, int] = {}
        self._shards: dict[int, MappedShard] = {}

    def add(self, shard: MappedShard) -> None:
        with self._lock:
            self._shards[shard.number] = shard
            self._users[shard.number] = 1

    def take(self, numbers: Iterable[int]) -> dict[int, MappedShard]:
        with self._lock:
            for number in numbers:
                self._users[number] += 1
            return {number: self._shards[number] for number in numbers}

    def give_back(self, numbers: Iterable[int]) -> None:
        with self._lock:
            unused = []
            for number in numbers:
                self._users[number] -= 1
                if not self._users[number] and number in self._shards:
                    del self._users[number]
                    unused.append(number)
            self._release(unused)

    def release_all(self) -> None:
        """What batches under way still read stays mapped without its lease."""
        with self._lock:
            self._release(list(self._shards))

    def _release(self, numbers: list[int]) -> None:
        for number in numbers:
            self._shards.pop(number).release()
        if numbers:
            self._forget(numbers)


class Assembler:
    """Iterate it once; `close()` (or the end of the iteration) stops its threads."""

    def __init__(
        self,
        maker: BatchMaker,
        single: bool,
        session: StagerSession,
        run: EpochRun,
        num_threads: int,
        ready: ReadyQueue[Ready | BaseException | None],
    ) -> None:
        self._maker = maker
        self._single = single
        self._session = session
        self._run = run
        self._open = _OpenShards(maker.forget)
        self._fed: set[int] = set()
        self._ready = ready
        self._next: Ready | None = None
        self._under_way: set[Future[Any]] = set()
        self._pool = ThreadPoolExecutor(num_threads, "forebay-assemble", maker.enter_thread)
        self._feeder = threading.Thread(target=self._feed, name="forebay-feed", daemon=True)
        self._feeder.start()

    def __iter__(self) -> Iterator[Ready]:
        while True:
            item = self._ready.take()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            self._next = item
            yield item

    def held(self) -> Held:
        """For the pacing monitor."""
        shard = self._session.waits_for
        if self._next and not self._next.batch.done() and not (self._single and shard):
            return Held("decoding")
        if self._session.reconnecting:
            return Held("network")
        return Held("storage" if shard else "", shard)

    def pace(self, keep_bytes: int | None) -> Runway:
        return self._session.pace(keep_bytes)

    def close(self) -> None:
        """What is under way may end by itself, for a while."""
        self._ready.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._session.close()
        self._feeder.join()
        _, late = wait(list(self._under_way), timeout=_END_S)
        if late:
            self._maker.abandon()
        self._pool.shutdown(wait=not late)
        self._open.release_all()

    def _feed(self) -> None:
        try:
            run = self._run
            for batch in run.order.batches(
                run.epoch,
                run.batch_size * run.world_size,
                run.start,
                self._open_block,
                drop_last=run.drop_last,
            ):
                if not self._ready.put(self._submit(batch)):
                    return
            self._ready.put(None)
        except BaseException as err:  # noqa: BLE001 - it is raised again where the batches are taken
            self._ready.put(err)

    def _open_block(self, block: int, shards: Ints, pending: Ints) -> list[int]:
        """Wait for a block's shards; those of earlier blocks go, but for what is still pending."""
        done = self._fed - set(pending[:, 0].tolist())
        self._open.give_back(done)
        self._fed -= done
        first = (block - self._run.start.block) * self._run.order.block_shards
        if self._single:
            # One sample each: they are opened by the threads that need them, and none for other ranks.
            self._session.advance(first)
            return [1] * len(shards)
        counts = []
        for place, number in enumerate(shards.tolist()):
            shard = self._session.need(number, first + place)
            self._open.add(shard)
            self._fed.add(number)
            counts.append(len(shard.samples))
        return counts

    def _submit(self, batch: GlobalBatch) -> Ready:
        rows, padded = slice_for_rank(batch.rows, self._run.rank, self._run.world_size)
        if self._single:
            size_bytes = sum(self._session.size_bytes(number) for number in rows[:, 0].tolist())
            future = self._pool.submit(self._maker.make, self._session, rows, {})
            self._follow(future)
            return Ready(future, batch.after, len(rows), padded, size_bytes)
        numbers, counts = np.unique(rows[:, 0], return_counts=True)
        shards = self._open.take(numbers.tolist())
        size_bytes = sum(
            count * self._session.size_bytes(number) // len(shards[number].samples)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
        )
        future = self._pool.submit(self._maker.make, self._session, rows, shards)
        self._follow(future)
        future.add_done_callback(lambda _: self._open.give_back(shards))
        return Ready(future, batch.after, len(rows), padded, size_bytes)

    def _follow(self, future: Future[Any]) -> None:
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
