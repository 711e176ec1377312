"""The shards of a dataset as its source lists them: streamed, in order, each once.

A listing that goes wrong must not pass for a small dataset: a page that comes twice, a loop of
continuation tokens or a name given twice is an error, never a shard more or less.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from forebay.core.errors import EmptyDataset, InvalidRequest, ListingBroken
from forebay.tiers.store import ObjectInfo, Store

# Which objects below a prefix belong to a dataset of that format; `raw` takes everything.
SUFFIXES = {"webdataset": (".tar",), "raw": ("",)}


async def list_shards(store: Store, format: str, keys: list[str] | None) -> AsyncIterator[ObjectInfo]:
    """As the store lists them; given keys keep their own order.

    Raises EmptyDataset, ObjectNotFound, ListingBroken, InvalidRequest for a format that nobody knows.
    """
    if format not in SUFFIXES:
        raise InvalidRequest(f"unknown format {format!r}", hint=f"one of {', '.join(sorted(SUFFIXES))}")
    if keys is None:
        async for info in _below(store, SUFFIXES[format]):
            yield info
        return
    if not keys:
        raise EmptyDataset(f"the list of keys below {store.url} is empty")
    if len(set(keys)) != len(keys):
        raise InvalidRequest("a key is named twice in the list of shards")
    for key in keys:
        yield await store.head(key)


async def _below(store: Store, suffixes: tuple[str, ...]) -> AsyncIterator[ObjectInfo]:
    taken = others = 0
    loops = _LoopWatch(store.url)
    async for info in store.list():
        loops.passed(info.key)
        if info.key.endswith(suffixes):
            taken += 1
            yield info
        else:
            others += 1
    if not taken and others:
        raise EmptyDataset(
            f"{store.url} holds {others} objects, but none that ends in {suffixes[0]}",
            hint="check the prefix and the format",
        )
    if not taken:
        raise EmptyDataset(f"there is nothing under {store.url}")


class _LoopWatch:
    """Some stores list out of order, so a step back is no fault; to step back to one key twice is a loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._last = ""
        self._stepped_back_to: set[str] = set()

    def passed(self, key: str) -> None:
        if key <= self._last or not self._last:
            if key in self._stepped_back_to:
                raise ListingBroken(f"{self._url} lists {key!r} again and again")
            self._stepped_back_to.add(key)
        self._last = key
