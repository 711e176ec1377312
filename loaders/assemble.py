"""Batches from mapped shards, in order.

A feeder thread walks the order, opens blocks of shards and hands rows to a pool of threads, which have
batches made of them; the consumer takes them in the same order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from forebay.core.errors import WorkerLost
from forebay.core.protocol import RankState, Runway
from forebay.loaders.open_shards import OpenShards
from forebay.loaders.order import Cursor, GlobalBatch, Ints, slice_for_rank
from forebay.loaders.pacing.monitor import Held
from forebay.loaders.ready import ReadyQueue
from forebay.loaders.session import MappedShard
from forebay.loaders.source import Sequencing, Session
from forebay.loaders.workers import BatchMaker

_END_S = 5.0


@dataclass(frozen=True)
class EpochRun:
    """One pass: what to read from where on."""

    order: Sequencing
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


class Assembler:
    """Iterate it once, between `start()` and `close()`."""

    def __init__(
        self,
        maker: BatchMaker,
        single: bool,
        session: Session,
        run: EpochRun,
        num_threads: int,
        ready: ReadyQueue[Ready | BaseException | None],
    ) -> None:
        self._pid = os.getpid()
        self._maker = maker
        self._single = single
        self._session = session
        self._run = run
        self._walk = run.order.walk(run.epoch, run.start, self)
        self._open = OpenShards(maker.forget)
        self._ready = ready
        self._next: Ready | None = None
        self._under_way: set[Future[Any]] = set()
        self._pool = ThreadPoolExecutor(num_threads, "forebay-assemble", maker.enter_thread)
        self._feeder = threading.Thread(target=self._feed, name="forebay-feed", daemon=True)

    def start(self) -> None:
        """Only once `close()` is sure to be called: a Ctrl-C may come as soon as threads run."""
        self._feeder.start()

    def __iter__(self) -> Iterator[Ready]:
        while True:
            self._check_process()
            item = self._ready.take()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            self._next = item
            yield item

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise WorkerLost(
                f"this iterator was begun by process {self._pid}; its threads are not in this copy of it",
                hint="call iter() on the loader where its batches are used",
            )

    def held(self) -> Held:
        """For the pacing monitor."""
        shard = self._session.waits_for
        if self._next and not self._next.batch.done() and not (self._single and shard):
            return Held("decoding")
        if self._session.reconnecting:
            return Held("network")
        return Held("storage" if shard else "", shard)

    def pace(self, keep_bytes: int | None, state: RankState | None = None) -> Runway:
        return self._session.pace(keep_bytes, state)

    def close(self) -> None:
        """What is under way may end by itself, for a while. A forked copy has nothing to end."""
        if os.getpid() != self._pid:
            return
        self._ready.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._session.close()
        if self._feeder.ident:
            self._feeder.join()
        _, late = wait(list(self._under_way), timeout=_END_S)
        if late:
            self._maker.abandon()
        self._pool.shutdown(wait=not late)
        self._open.release_all()

    def _feed(self) -> None:
        try:
            run = self._run
            for batch in self._walk.batches(run.batch_size * run.world_size, drop_last=run.drop_last):
                if not self._ready.put(self._submit(batch)):
                    return
            self._ready.put(None)
        except BaseException as err:  # noqa: BLE001 - it is raised again where the batches are taken
            self._ready.put(err)

    def plan(self, shards: Ints, window: int) -> None:
        """For the walk, as `open`."""
        self._session.open_plan(shards.tolist(), window)

    def open(self, place: int, shards: Ints, pending: Ints) -> list[int]:
        """Wait for these shards; those opened earlier go, but for what is still pending."""
        self._session.advance(int(shards[0]), place)
        if self._single:
            # One sample each: they are opened by the threads that need them, and none for other ranks.
            return [1] * len(shards)
        self._open.turn(set(pending[:, 0].tolist()))
        return [len(self._opened(number).samples) for number in shards.tolist()]

    def _opened(self, number: int) -> MappedShard:
        """A dataset of a mixture may come round again while its last shards are in use."""
        shard = self._open.get(number)
        if shard is None:
            shard = self._session.need(number)
            self._open.add(shard)
        return shard

    def _submit(self, batch: GlobalBatch) -> Ready:
        rows, padded = slice_for_rank(batch.rows, self._run.rank, self._run.world_size)
        if self._single:
            size_bytes = sum(self._session.size_bytes(number) for number in rows[:, 0].tolist())
            future = self._pool.submit(self._maker.make, self._session, rows, {})
        else:
            view = self._open.take()
            size_bytes = int(len(rows) * view.sample_bytes)
            future = self._pool.submit(self._maker.make, self._session, rows, view.shards)
            future.add_done_callback(lambda _: self._open.give_back(view))
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return Ready(future, batch.after, len(rows), padded, size_bytes)
