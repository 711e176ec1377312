"""The loader's connection to stagerd: a plan out, mapped shards in.

When the daemon goes away (restart, crash) the session connects again, repeats its plan and asks
again: descriptors already handed out stay good all the while.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import pyarrow as pa

from forebay.core.channel import Channel, close_all
from forebay.core.config import Settings
from forebay.core.errors import DaemonUnavailable
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
    PublishIndex,
    Register,
    ShardReady,
)
from forebay.loaders.formats import Format
from forebay.loaders.index import ShardIndex
from forebay.loaders.private import connect_private

log = logging.getLogger("forebay.loaders")
M = TypeVar("M", bound=Message)
T = TypeVar("T")

_RECONNECT_S = 60.0
_RECONNECT_PAUSE_S = 0.2
# Beyond the daemon's own limit of a wait, so that its error, which knows more, comes first.
_GRACE_S = 15.0


class MappedShard:
    """A staged shard in memory, leased until `release()`.

    Its bytes are valid as long as the object lives, whatever is evicted or restarted.
    """

    def __init__(self, number: int, name: str, data: mmap.mmap, index: ShardIndex, lease: Channel) -> None:
        self.number = number
        self.name = name
        self.data = data
        self.array = np.frombuffer(data, dtype=np.uint8)
        self.index = index
        self._lease = lease

    def release(self) -> None:
        self._lease.close()


class StagerSession:
    """Thread-safe. `close()` ends it; the kernel does when the process dies."""

    def __init__(self, request: Register | OpenDataset, format: Format, cache_dir: Path | None) -> None:
        self._format = format
        self._cache_dir = cache_dir
        self._settings = Settings.load()
        self._closed = threading.Event()
        self._restoring = threading.Lock()
        self._plan: OpenPlan | None = None
        self._asking: Channel | None = None
        self._channel = self._connect()
        reply, (fd,) = self._request(request, DatasetReply)
        try:
            table = pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{fd}")).read_all()
        finally:
            os.close(fd)
        self.dataset: Dataset = reply.dataset
        self._keys = table["key"]
        self.sizes_bytes: list[int] = table["size_bytes"].to_pylist()

    def name_of(self, shard: int) -> str:
        return f"{self.dataset.url}/{self._keys[shard].as_py()}"

    def open_plan(self, shards: Sequence[int], window: int) -> None:
        plan = OpenPlan(self.dataset.id, list(shards), window)
        self._request(plan, Done)
        self._plan = plan

    def need(self, shard: int, position: int | None = None) -> MappedShard:
        """Wait until the shard is here, lease it, map it, index it if nobody has yet.

        `position` is its place in the plan.
        """
        if position is not None:
            self._request(Advance(position), Done)
        return self._retrying(lambda: self._lease(shard))

    def _lease(self, shard: int) -> MappedShard:
        lease = self._connect()
        self._asking = lease
        try:
            if self._closed.is_set():
                raise DaemonUnavailable("the session is closed")
            ready, fds = lease.request(
                NeedShard(self.dataset.id, shard),
                expect=ShardReady,
                timeout_s=self._settings.stager.wait_s + _GRACE_S,
            )
            try:
                index = _read_index(fds[1]) if ready.has_index else self._build_index(shard, fds[0])
                data = _map(fds[0], ready.size_bytes)
            finally:
                close_all(fds)
        except BaseException:
            lease.close()
            raise
        return MappedShard(shard, self.name_of(shard), data, index, lease)

    def counts(self) -> list[int]:
        """Samples per shard, all of them: what nobody has indexed yet is indexed now.

        The ranks of a node share that work, each shard is read once.
        """
        while True:
            known, _ = self._request(GetCounts(self.dataset.id), Counts)
            if min(known.samples) >= 0:
                return known.samples
            task, _ = self._request(ClaimIndex(self.dataset.id), IndexTask, timeout_s=600.0)
            if task.shard is not None:
                self.need(task.shard).release()

    def close(self) -> None:
        self._closed.set()
        self._channel.close()
        if self._asking:
            self._asking.close()

    def __enter__(self) -> StagerSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build_index(self, shard: int, fd: int) -> ShardIndex:
        index = self._format.index(fd, self.name_of(shard))
        self._request(PublishIndex(self.dataset.id, shard, len(index), index.encode()), Done)
        return index

    def _connect(self) -> Channel:
        try:
            return Channel.connect(self._settings.stager_socket, "loader")
        except DaemonUnavailable:
            return connect_private(self._cache_dir)

    def _request(self, message: Message, expect: type[M], timeout_s: float = 120.0) -> tuple[M, list[int]]:
        return self._retrying(lambda: self._channel.request(message, expect=expect, timeout_s=timeout_s))

    def _retrying(self, call: Callable[[], T]) -> T:
        """Outlive a restart of the daemon. Raises the last DaemonUnavailable when it stays away."""
        deadline = time.monotonic() + _RECONNECT_S
        while True:
            channel = self._channel
            try:
                return call()
            except DaemonUnavailable as err:
                if self._closed.is_set() or time.monotonic() > deadline:
                    raise
                self._restore(channel, err, deadline)

    def _restore(self, broken: Channel, cause: DaemonUnavailable, deadline: float) -> None:
        """A new connection with the old plan."""
        with self._restoring:
            if self._channel is not broken:
                return
            log.warning("stagerd went away, connecting again: %s", cause)
            broken.close()
            while True:
                try:
                    self._channel = self._connect()
                    break
                except DaemonUnavailable:
                    if time.monotonic() > deadline or self._closed.wait(_RECONNECT_PAUSE_S):
                        raise
            if self._plan:
                self._channel.request(self._plan, expect=Done)


def _map(fd: int, size_bytes: int) -> mmap.mmap:
    """Mapped with its pages, here and at once: cheaper than a fault per page in the middle of a batch."""
    if not size_bytes:
        # mmap refuses an empty file; an anonymous page keeps the type.
        return mmap.mmap(-1, 1)
    # A stage job leaves nothing in the page cache: large reads from the disk, not one per fault.
    os.posix_fadvise(fd, 0, size_bytes, os.POSIX_FADV_WILLNEED)
    return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)


def _read_index(fd: int) -> ShardIndex:
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return ShardIndex.decode(file.read())
