"""The loader's connection to stagerd: a plan out, mapped shards in.

When the daemon goes away (restart, crash) the session connects again, repeats its plan and asks
again: descriptors already handed out stay good all the while.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from forebay.core.channel import Channel, close_all
from forebay.core.config import Settings
from forebay.core.errors import DaemonUnavailable, ForebayError
from forebay.core.protocol import (
    Advance,
    ClaimIndex,
    Counts,
    Dataset,
    DatasetReply,
    Done,
    GetCounts,
    IndexTask,
    Message,
    NeedShard,
    OpenDataset,
    OpenPlan,
    Pace,
    PublishIndex,
    RankState,
    Register,
    Runway,
    ShardReady,
)
from forebay.loaders.formats import Format, Index, Samples, ShardFile
from forebay.loaders.private import connect_private
from forebay.loaders.unpack import is_packed, unpack

log = logging.getLogger("forebay.loaders")
M = TypeVar("M", bound=Message)
T = TypeVar("T")

_RECONNECT_S = 60.0
_PACE_S = 2.0
_RECONNECT_PAUSE_S = 0.2
# Beyond the daemon's own limit of a wait, so that its error, which knows more, comes first.
_GRACE_S = 15.0
# Sockets at which this process found a stagerd that is not its own.
_answered: set[Path] = set()


class MappedShard:
    """A staged shard in memory, leased until `release()`.

    Its bytes are valid as long as the object lives, whatever is evicted or restarted.
    """

    def __init__(self, number: int, file: ShardFile, samples: Samples, lease: Channel) -> None:
        self.number = number
        # Of a mixture: which of its datasets.
        self.part = 0
        self.file = file
        self.samples = samples
        self._lease = lease

    @property
    def name(self) -> str:
        return self.file.name

    def release(self) -> None:
        self._lease.close()


class StagerSession:
    """Thread-safe. `close()` ends it; the kernel does when the process dies.

    Shards are numbered among those objects of the dataset that hold samples. `socket`: of another session
    of this job, instead of looking for a stagerd.
    """

    def __init__(
        self,
        request: Register | OpenDataset,
        format: Format,
        fields: Sequence[str],
        cache_dir: Path | None,
        socket: Path | None = None,
    ) -> None:
        self._format = format
        self._fields = fields
        self._cache_dir = cache_dir
        self._settings = Settings.load()
        self._closed = threading.Event()
        self._restoring = threading.Lock()
        self._plan: OpenPlan | None = None
        self._asking: set[Channel] = set()
        # For the pacing monitor: what the feeder waits for now.
        self.waits_for = ""
        self.reconnecting = False
        self._given = socket
        self._private = False
        self._said_at = -math.inf
        self._pacing: Channel | None = None
        self._channel = self._first_connection()
        reply, (fd,) = self._request(request, DatasetReply)
        try:
            table = pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{fd}")).read_all()
        finally:
            os.close(fd)
        self.dataset: Dataset = reply.dataset
        self._keys = table["key"]
        self._sizes_bytes = table["size_bytes"].to_numpy()
        self._objects = _objects_with_samples(format, self._keys)

    @property
    def socket(self) -> Path:
        return self._channel.path

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    @property
    def shards(self) -> int:
        return len(self._objects)

    @cached_property
    def keys(self) -> list[str]:
        keys: list[str] = self._keys.take(pa.array(self._objects)).to_pylist()
        return keys

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {key: number for number, key in enumerate(self.keys)}

    def number_of(self, key: str) -> int | None:
        return self._numbers.get(key)

    def size_bytes(self, shard: int) -> int:
        return int(self._sizes_bytes[self._objects[shard]])

    def open_plan(self, shards: Sequence[int], window: int) -> None:
        objects = [int(self._objects[shard]) for shard in shards]
        plan = OpenPlan(self.dataset.id, objects, window, secrets.token_hex(8))
        self._request(plan, Done)
        self._plan = plan

    def need(self, shard: int, position: int | None = None) -> MappedShard:
        """Wait until the shard is here, lease it, map it, index it if nobody has yet.

        `position` is its place in the plan.
        """
        if position is not None:
            self.advance(shard, position)
        with self._waiting_for(shard):
            return self._retrying(lambda: self._lease(shard))

    def pace(self, keep_bytes: int | None, state: RankState | None = None) -> Runway:
        """Of one thread, by a connection of its own: nobody waits for pacing, and it for nobody.

        Raises DaemonUnavailable, WaitTimeout.
        """
        try:
            if self._pacing is None:
                self._pacing = self._connect()
            plan = self._plan.name if self._plan else ""
            return self._pacing.request(Pace(plan, keep_bytes, state), expect=Runway, timeout_s=_PACE_S)[0]
        except ForebayError:
            if self._pacing:
                self._pacing.close()
            self._pacing = None
            raise

    def _name_of(self, shard: int) -> str:
        return f"{self.dataset.url}/{self._keys[int(self._objects[shard])].as_py()}"

    def advance(self, shard: int, position: int) -> None:
        """What lies before that place in the plan, which is the shard's, is past."""
        with self._waiting_for(shard):
            self._request(Advance(position), Done)

    @contextmanager
    def _waiting_for(self, shard: int) -> Iterator[None]:
        self.waits_for = self._name_of(shard)
        try:
            yield
        finally:
            self.waits_for = ""

    def _lease(self, shard: int) -> MappedShard:
        number = int(self._objects[shard])
        lease = self._connect()
        self._asking.add(lease)
        try:
            if self._closed.is_set():
                raise DaemonUnavailable("the session is closed")
            file, index = self._map(lease, number, self._companion(lease, number))
            if index is None:
                index = self._build_index(number, file)
            return MappedShard(shard, file, self._format.open(file, index, self._fields), lease)
        except BaseException:
            lease.close()
            raise
        finally:
            self._asking.discard(lease)

    def _companion(self, lease: Channel, number: int) -> ShardFile | None:
        """Leased by the same connection."""
        key = self._format.companion_of(self._keys[number].as_py())
        if key is None:
            return None
        place = pc.index(self._keys, key).as_py()
        return None if place < 0 else self._map(lease, place, None)[0]

    def _map(
        self, lease: Channel, number: int, companion: ShardFile | None
    ) -> tuple[ShardFile, bytes | None]:
        """The object in memory, and its index if somebody has built it."""
        key = self._keys[number].as_py()
        ready, fds = lease.request(
            NeedShard(self.dataset.id, number, "" if self._format.single else self._format.signature),
            expect=ShardReady,
            timeout_s=self._settings.stager.wait_s + _GRACE_S,
        )
        try:
            name = f"{self.dataset.url}/{key}"
            if is_packed(key):
                data, size_bytes = unpack(fds[0], name)
            else:
                data, size_bytes = _map(fds[0], ready.size_bytes), ready.size_bytes
            index = _read_all(fds[1]) if ready.has_index else None
        finally:
            close_all(fds)
        return ShardFile(name, data, size_bytes, companion), index

    def counts(self) -> list[int]:
        """Samples per shard, all of them: what nobody has indexed yet is indexed now.

        The ranks of a node share that work, each shard is read once.
        """
        if self._format.single:
            return [1] * self.shards
        known = self._known_counts()
        if min(known) < 0:
            claim = ClaimIndex(self.dataset.id, self._format.signature)
            while (task := self._request(claim, IndexTask, timeout_s=600.0)[0]).shard is not None:
                if self._plan is None:
                    # So that they are fetched while others are indexed.
                    self.open_plan(range(self.shards), 1)
                self._count(task.shard)
            known = self._known_counts()
        return [known[number] for number in self._objects]

    def _known_counts(self) -> list[int]:
        return self._request(GetCounts(self.dataset.id, self._format.signature), Counts)[0].samples

    def _count(self, number: int) -> None:
        if self._format.is_shard(self._keys[number].as_py()):
            place = int(np.searchsorted(self._objects, number))
            self.need(place, place).release()
        else:
            self._publish(number, Index(0))

    def close(self) -> None:
        self._closed.set()
        self._channel.close()
        for lease in (*self._asking, self._pacing):
            if lease:
                lease.close()

    def __enter__(self) -> StagerSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build_index(self, number: int, file: ShardFile) -> bytes:
        index = self._format.index(file)
        self._publish(number, index)
        return index.payload

    def _publish(self, number: int, index: Index) -> None:
        if not self._format.single:
            signature = self._format.signature
            publish = PublishIndex(self.dataset.id, number, index.samples, index.payload, signature)
            self._request(publish, Done)

    def _first_connection(self) -> Channel:
        """A stagerd that answered this job before comes back; only without one is a private one started."""
        path = self._given or self._settings.stager_socket
        try:
            channel = self._connect()
        except DaemonUnavailable as err:
            if self._given is None and path not in _answered:
                self._private = True
                return self._connect()
            log.warning("stagerd went away, connecting again: %s", err)
            channel = self._connect_again(time.monotonic() + _RECONNECT_S)
        _answered.add(path)
        return channel

    def _connect(self) -> Channel:
        """To the stagerd of the first time: one that restarts is waited for, not gone without."""
        if self._private:
            return connect_private(self._cache_dir)
        return Channel.connect(self._given or self._settings.stager_socket, "loader")

    def _request(self, message: Message, expect: type[M], timeout_s: float = 120.0) -> tuple[M, list[int]]:
        return self._retrying(lambda: self._channel.request(message, expect=expect, timeout_s=timeout_s))

    def _retrying(self, call: Callable[[], T]) -> T:
        """Outlive a restart of the daemon. Raises the last DaemonUnavailable when it stays away."""
        deadline = time.monotonic() + _RECONNECT_S
        for attempt in itertools.count():
            channel = self._channel
            try:
                return call()
            except DaemonUnavailable as err:
                # One that answers and hangs up on this request would do so for ever.
                if attempt and self._closed.wait(_RECONNECT_PAUSE_S):
                    raise
                if self._closed.is_set() or time.monotonic() > deadline:
                    raise
                self._restore(channel, err, deadline)
        raise AssertionError("counting has no end")

    def _restore(self, broken: Channel, cause: DaemonUnavailable, deadline: float) -> None:
        """A new connection with the old plan."""
        with self._restoring:
            if self._channel is not broken:
                return
            if time.monotonic() - self._said_at > _RECONNECT_S:
                self._said_at = time.monotonic()
                log.warning("stagerd went away, connecting again: %s", cause)
            broken.close()
            self.reconnecting = True
            self._channel = self._connect_again(deadline)
            self.reconnecting = False
            if self._plan:
                self._channel.request(self._plan, expect=Done)

    def _connect_again(self, deadline: float) -> Channel:
        while True:
            try:
                return self._connect()
            except DaemonUnavailable:
                if time.monotonic() > deadline or self._closed.wait(_RECONNECT_PAUSE_S):
                    raise


def _map(fd: int, size_bytes: int) -> mmap.mmap:
    """Without its pages: the kernel maps them by the dozen as batches come to them, in the workers' time."""
    if not size_bytes:
        # mmap refuses an empty file; an anonymous page keeps the type.
        return mmap.mmap(-1, 1)
    # A stage job leaves nothing in the page cache: large reads from the disk, begun now.
    os.posix_fadvise(fd, 0, size_bytes, os.POSIX_FADV_WILLNEED)
    return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def _read_all(fd: int) -> bytes:
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return file.read()


def _objects_with_samples(format: Format, keys: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    if type(format).is_shard is Format.is_shard:
        return np.arange(len(keys))
    return np.array([number for number, key in enumerate(keys.to_pylist()) if format.is_shard(key)], np.int64)
