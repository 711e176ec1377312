"""Shards in use: each is released when the order is past it and no batch under way is cut from it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property

from forebay.loaders.session import MappedShard


class View:
    """The shards that are open at one moment, for all batches that are begun then."""

    def __init__(self, shards: dict[int, MappedShard]) -> None:
        self.shards = shards
        self.users = 1

    @cached_property
    def sample_bytes(self) -> float:
        """A sample's share of the shards."""
        samples = sum(len(shard.samples) for shard in self.shards.values())
        return sum(shard.file.size_bytes for shard in self.shards.values()) / max(1, samples)


class OpenShards:
    """Turned by the feeder from one set to the next; batches take and give back what was open for them.

    forget: told of those that nobody uses any more.
    """

    def __init__(self, forget: Callable[[list[int]], None]) -> None:
        self._forget = forget
        self._lock = threading.Lock()
        self._views = Counter[int]()
        self._open: dict[int, MappedShard] = {}
        self._now = View({})

    def turn(self, keep: Iterable[int]) -> None:
        """Of what is open only `keep` stays."""
        with self._lock:
            before, kept = self._now, {number: self._open[number] for number in keep}
            self._views.update(kept.keys())
            self._now = View(kept)
        self.give_back(before)

    def add(self, shard: MappedShard) -> None:
        """Before anybody takes what is open since the turn."""
        with self._lock:
            self._open[shard.number] = self._now.shards[shard.number] = shard
            self._views[shard.number] += 1

    def get(self, number: int) -> MappedShard | None:
        """If it stays open."""
        return self._now.shards.get(number)

    def take(self) -> View:
        with self._lock:
            self._now.users += 1
            return self._now

    def give_back(self, view: View) -> None:
        with self._lock:
            view.users -= 1
            if view.users:
                return
            self._views.subtract(view.shards.keys())
            self._release([number for number in view.shards if not self._views[number]])

    def release_all(self) -> None:
        """What batches under way still read stays mapped without its lease."""
        with self._lock:
            self._release(list(self._open))

    def _release(self, numbers: list[int]) -> None:
        unused = [number for number in numbers if number in self._open]
        for number in unused:
            self._open.pop(number).release()
        if unused:
            self._forget(unused)
