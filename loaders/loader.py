"""DataLoader: the drop-in. Iterating it yields this rank's batches of one epoch."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Any, Literal, TypedDict, get_args

import torch.distributed

from forebay.core.errors import DatasetNotFound, InvalidRequest, StateMismatch
from forebay.core.units import format_bytes
from forebay.loaders.affinity import cpus_for_this_rank
from forebay.loaders.assemble import Assembler, EpochRun, Ready
from forebay.loaders.order import Cursor, count_batches
from forebay.loaders.pacing.meter import StepMeter
from forebay.loaders.pacing.monitor import Monitor, Pacing, Place
from forebay.loaders.pool import BatchPool
from forebay.loaders.ready import ReadyQueue, size_of
from forebay.loaders.source import Sequencing, Session, Source
from forebay.loaders.stats import LoaderStats
from forebay.loaders.workers import BatchMaker, Collate, InProcesses, InThreads, Recipe

Workers = Literal["thread", "process", "fork"]

_STATE_VERSION = 3
# Ranks run one script, so that they count their loaders alike.
_numbers = itertools.count()


class LoaderState(TypedDict):
    """Where a job stands: the same on every rank, valid for any other number of ranks.

    `format` names the way in which shards are cut into samples; `parts` is a mixture's (see `Cursor`).
    """

    version: int
    fingerprint: str
    format: str
    seed: int
    shuffle: bool
    block_shards: int
    epoch: int
    block: int
    offset: int
    samples: int
    parts: list[list[int]]


class DataLoader:
    """Batches of a StagedDataset or a Mixture, in an order that depends on (dataset, seed, epoch) alone.

    batch_size: samples per rank and batch.
    rank, world_size: this process's place; from torch.distributed when it is initialised, else from
        RANK and WORLD_SIZE, else 0 and 1.
    drop_last: leave out the last, short batch of the job; otherwise it is shared out evenly, with
        samples of its own repeated where it does not divide (`stats.padded`).
    shuffle_block: shards whose samples are mixed with each other; a loader holds up to two blocks open. By
        default 8, or 256 where each shard is one sample.
    collate_fn: makes a batch of a list of samples; by default columns, stacked where shapes agree.
    num_workers: threads that cut and decode; with workers="process" that many processes, for transforms
        that keep the GIL, started afresh once per loader, so that the script needs
        `if __name__ == "__main__"`; "fork" copies this process, before CUDA and threads. Same batches.
    pin_memory: batches in page-locked memory; by default where CUDA is initialised already. Workers run on
        the CPUs near the GPU then (`loaders.affinity`).
    prefetch: batches ready or under way, more while the training has to wait; max_ready_bytes: how much
        memory they may take together (one batch always may).
    pacing: how the ranks are watched, and when an alarm is raised; None for no watch at all.
    explain: print what a pass will do (`explain()`).

    Each pass is of the next epoch, also after one that was left early; `set_epoch` sets it. `state_dict()`
    describes the position behind the batch last yielded.
    """

    # Trainers ask for it where there is a sampler.
    batch_sampler = None

    def __init__(
        self,
        dataset: Source,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        num_workers: int = 2,
        workers: Workers = "thread",
        pin_memory: bool | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle_block: int | None = None,
        prefetch: int = 4,
        max_ready_bytes: int = 1 << 30,
        collate_fn: Collate | None = None,
        pacing: Pacing | None = Pacing(),  # noqa: B008 - frozen
        explain: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = _at_least_one(batch_size, "batch_size")
        self.rank, self.world_size = _place(rank, world_size)
        self.stats = LoaderStats()
        self._num_workers = _at_least_one(num_workers, "num_workers")
        if workers not in get_args(Workers):
            raise InvalidRequest(f"workers is {workers!r}", hint="thread, process or fork")
        self._workers = workers
        self._prefetch = _at_least_one(prefetch, "prefetch")
        self._max_ready_bytes = _at_least_one(max_ready_bytes, "max_ready_bytes")
        self._pacing = pacing
        self._meter = StepMeter()
        self._drop_last = drop_last
        self._maker = _open_maker(
            dataset, workers, self._num_workers, collate_fn, seed, BatchPool(max_ready_bytes, pin_memory)
        )
        weakref.finalize(self, self._maker.close)
        self._epoch = 0
        self._cursor = Cursor()
        self._resuming = self._begun = False
        with dataset.open_session() as session:
            self._dataset_info = session.dataset
            self._order: Sequencing = dataset.order(session, shuffle, seed, shuffle_block)
        self._counts: list[int] | None = None
        self._number = next(_numbers)
        if explain:
            print(self.explain())

    def __iter__(self) -> Generator[Any, None, None]:
        start = self._cursor if self._resuming else Cursor()
        if self._begun and not self._resuming:
            # Trainers that count batches leave a pass without asking for its end.
            self._epoch += 1
        self._resuming, self._begun, self._cursor = False, False, start
        epoch = self._epoch
        self._maker.begin()
        with self._open_session() as session:
            run = EpochRun(
                self._order, epoch, start, self.batch_size, self.rank, self.world_size, self._drop_last
            )
            queue = ReadyQueue[Ready | BaseException | None](self._prefetch, self._max_ready_bytes)
            assembler = Assembler(self._maker, self.dataset.single, session, run, self._num_workers, queue)
            with ExitStack() as ends:
                ends.callback(assembler.close)
                assembler.start()
                ends.callback(self._meter.stopped)
                if self._pacing:
                    place = Place(self._job, self.rank, self.world_size)
                    watch = Monitor(self._pacing, self._meter, assembler, place, self.stats.looked)
                    ends.enter_context(watch)
                yield from self._take(assembler, queue)
        self._epoch, self._begun, self._cursor = epoch + 1, False, Cursor()

    def _take(self, assembler: Assembler, queue: ReadyQueue[Ready | BaseException | None]) -> Iterator[Any]:
        self._meter.asked()
        for ready in assembler:
            batch = ready.batch.result()
            queue.weighed(size_of(batch))
            self.stats.waited(self._meter.given(ready.source_bytes))
            self.stats.batches += 1
            self.stats.failed = self._maker.failed
            self.stats.samples += ready.samples - ready.padded
            self.stats.padded += ready.padded
            self._cursor, self._begun = ready.after, True
            yield batch
            self._meter.asked()

    def __len__(self) -> int:
        """Batches of the next epoch, which are as many in each, but for mixtures.

        Needs every shard counted: on a new dataset this reads all of it once.
        """
        if self._counts is None:
            with self._open_session() as session:
                self._counts = session.counts()
        samples = self._order.count_samples(self._epoch, self._counts)
        return count_batches(samples, self.batch_size * self.world_size, drop_last=self._drop_last)

    def explain(self) -> str:
        """What a pass over this loader will do, in words; it reads nothing."""
        info, order = self._dataset_info, self._order
        open_bytes = min(order.window * info.largest_bytes, info.size_bytes)
        lines = [
            f"{info.url} as {self.dataset.signature}: {order.shards} shards, "
            f"{format_bytes(info.size_bytes)}, the largest {format_bytes(info.largest_bytes)}",
            f"order: epoch {self._epoch}, {order.describe()}",
            f"rank {self.rank} of {self.world_size}: {self.batch_size} samples a batch, "
            f"{self.batch_size * self.world_size} together"
            + (f", {len(self)} batches an epoch" if self._counts is not None else ""),
            f"open at once: up to {order.window} shards, {format_bytes(open_bytes)}",
            f"ready: {self._prefetch} batches or more, up to {format_bytes(self._max_ready_bytes)}, "
            f"made by {self._num_workers} {'threads' if self._workers == 'thread' else 'processes'}",
        ]
        return "\n".join(lines)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass. Naming the epoch that a loaded state is in keeps its position."""
        self._begun = False
        if epoch != self._epoch:
            self._epoch, self._cursor, self._resuming = epoch, Cursor(), False

    @property
    def sampler(self) -> DataLoader:
        """Where trainers (Lightning) look for `set_epoch`."""
        return self

    def state_dict(self) -> LoaderState:
        return LoaderState(
            version=_STATE_VERSION,
            fingerprint=self._dataset_info.fingerprint,
            format=self.dataset.signature,
            seed=self._order.seed,
            shuffle=self._order.shuffle,
            block_shards=self._order.block_shards,
            epoch=self._epoch,
            block=self._cursor.block,
            offset=self._cursor.offset,
            samples=self._cursor.samples,
            parts=[list(part) for part in self._cursor.parts],
        )

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on where that state was taken. Raises StateMismatch when it belongs to another order."""
        mine = self.state_dict()
        missing = [key for key in mine if key not in state]
        if missing:
            raise StateMismatch(f"this is not a loader's state: it lacks {', '.join(missing)}")
        for key in ("version", "fingerprint", "format", "seed", "shuffle", "block_shards"):
            if state[key] != mine[key]:
                raise StateMismatch(
                    f"the saved state has {key} {state[key]!r}, this loader has {mine[key]!r}",
                    hint="resume with the same dataset, format, seed, shuffle and shuffle_block; "
                    "ranks, batch size and threads may differ",
                )
        self._epoch = state["epoch"]
        parts = tuple((part[0], part[1], part[2], part[3]) for part in state["parts"])
        self._cursor = Cursor(state["block"], state["offset"], state["samples"], parts)
        self._resuming = True

    @property
    def _job(self) -> str:
        """The same on every rank, another one for another loader of the job."""
        made = f"{self._dataset_info.fingerprint}:{self.dataset.signature}:{self._number}"
        return f"{made}:{self._order.seed}:{self.batch_size}"

    def _open_session(self) -> Session:
        """The listing this loader was made with, not a new one: an epoch keeps its versions (F8).

        Raises StateMismatch when the daemon has forgotten that listing and the source has changed.
        """
        try:
            known: Session = self.dataset.open_session(self._dataset_info.id)
            return known
        except DatasetNotFound:
            session: Session = self.dataset.open_session()
        if session.dataset.fingerprint != self._dataset_info.fingerprint:
            session.close()
            raise StateMismatch(
                f"{self._dataset_info.url} has changed since this loader was made",
                hint="make a new DataLoader to train on the new version",
            )
        self._dataset_info = session.dataset
        return session


def _open_maker(
    dataset: Source, workers: Workers, number: int, collate: Collate | None, seed: int, pool: BatchPool
) -> BatchMaker:
    cpus = cpus_for_this_rank()
    if workers == "thread":
        return InThreads(dataset.reader, collate, pool, cpus)
    recipe = Recipe(dataset, collate, seed, cpus)
    return InProcesses(recipe, number, "fork" if workers == "fork" else "spawn")


def _at_least_one(value: int, name: str) -> int:
    if value < 1:
        raise InvalidRequest(f"{name} is {value}, must be at least 1")
    return value


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        known = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        known = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    place = known[0] if rank is None else rank, known[1] if world_size is None else world_size
    if not 0 <= place[0] < place[1]:
        raise InvalidRequest(f"rank {place[0]} is not below world_size {place[1]}")
    return place
