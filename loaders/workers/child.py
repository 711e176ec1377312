"""A process that makes batches: it maps what the trainer has had staged, by a session of its own."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.loaders.order import Ints
from forebay.loaders.pool import BatchPool
from forebay.loaders.session import MappedShard
from forebay.loaders.source import Session, Source
from forebay.loaders.workers.maker import Collate, InThreads
from forebay.loaders.workers.transport import Outbox

# The slot is what is used again; this memory is only passed through.
_POOL_BYTES = 64 << 20


@dataclass(frozen=True)
class Recipe:
    """What every child is told once."""

    source: Source
    collate: Collate | None
    seed: int
    cpus: frozenset[int]


@dataclass(frozen=True)
class Make:
    """`keep`: the shards of these rows stay mapped until they are forgotten. `freed`: slots."""

    socket: Path
    dataset_id: str
    rows: Ints
    keep: bool
    freed: list[int]


@dataclass(frozen=True)
class Forget:
    shards: list[int]


@dataclass(frozen=True)
class Failed:
    """What the batch raised; as text where it cannot be sent."""

    error: BaseException


def run(recipe: Recipe, own: connection.Connection, number: int) -> None:
    """The child's main function: ends with its parent, or when told nothing more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="forebay-watch", daemon=True).start()
    _sow(recipe.seed + number)
    torch.set_num_threads(1)
    if recipe.cpus:
        os.sched_setaffinity(0, recipe.cpus)
    child = _Child(recipe)
    parent = parent_process()
    outbox = Outbox(own, parent.pid if parent and parent.pid else os.getppid())
    with suppress(EOFError, ConnectionError), ExitStack() as ends:
        ends.callback(child.close)
        own.send(None)
        while True:
            match own.recv():
                case Forget(shards):
                    child.forget(shards)
                case Make() as wanted:
                    outbox.freed(wanted.freed)
                    _answer(outbox, child, wanted)


def _answer(outbox: Outbox, child: _Child, wanted: Make) -> None:
    try:
        batch = child.make(wanted)
        outbox.send(batch, child.failed)
    except (EOFError, ConnectionError):
        raise
    except Exception as err:  # noqa: BLE001 - it is raised again in the trainer
        outbox.send(Failed(_sendable(err)), child.failed)


class _Child:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._maker = InThreads(recipe.source.reader, recipe.collate, BatchPool(_POOL_BYTES))
        self._session: Session | None = None
        self._opened: tuple[Path, str] | None = None
        self._shards: dict[int, MappedShard] = {}

    @property
    def failed(self) -> int:
        return self._maker.failed

    def make(self, wanted: Make) -> Any:
        session = self._session_of(wanted.socket, wanted.dataset_id)
        if wanted.keep:
            for number in set(wanted.rows[:, 0].tolist()) - set(self._shards):
                self._shards[number] = session.need(number)
            return self._maker.make(session, wanted.rows, self._shards)
        return self._maker.make(session, wanted.rows, {})

    def forget(self, shards: Iterable[int]) -> None:
        for number in shards:
            if shard := self._shards.pop(number, None):
                shard.release()

    def close(self) -> None:
        self.forget(list(self._shards))
        if self._session:
            self._session.close()

    def _session_of(self, socket: Path, dataset_id: str) -> Session:
        if self._session is None or self._opened != (socket, dataset_id):
            self.close()
            self._session = self._recipe.source.open_session(dataset_id, socket)
            self._opened = socket, dataset_id
        assert self._session
        return self._session


def _end_with_parent() -> None:
    """A trainer that is killed closes nothing that a transform would notice."""
    if parent := parent_process():
        parent.join()
        os._exit(1)


def _sow(seed: int) -> None:
    """A forked child would draw the same numbers as its siblings."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _sendable(err: Exception) -> BaseException:
    try:
        pickle.loads(pickle.dumps(err))
    except Exception:  # noqa: BLE001 - then its text has to do
        return RuntimeError(f"{type(err).__name__}: {err}")
    return err
