"""The shards of a dataset as its source lists them: streamed, in order, each once.

A listing that goes wrong must not pass for a small dataset: a page that comes twice, a loop of
continuation tokens or a name given twice is an error, never a shard more or less.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from forebay.core.errors import EmptyDataset, InvalidRequest, ListingBroken
from forebay.tiers.store import ObjectInfo, Store

_PACKED = r"(\.(gz|zst|zstd|bz2))?$"
# Which objects below a prefix belong to a dataset of that format; `raw` takes everything.
FORMATS = {
    "webdataset": re.compile(r"\.(tar" + _PACKED[:-1] + r"|tgz)$"),
    "tfrecord": re.compile(r"(\.tfrecords?|-\d{5,}-of-\d{5,})" + _PACKED),
    "parquet": re.compile(r"\.(parquet|pq)$"),
    "arrow": re.compile(r"\.(arrow|feather|ipc)$"),
    "mds": re.compile(r"\.mds" + _PACKED),
    "tokens": re.compile(r"\.(npy|bin)" + _PACKED),
    "megatron": re.compile(r"\.(idx|bin)$"),
    "folder": re.compile(r"(^|/)[^./][^/]*$"),
    "raw": re.compile(""),
}


async def list_shards(store: Store, format: str, keys: list[str] | None) -> AsyncIterator[ObjectInfo]:
    """As the store lists them; given keys keep their own order.

    Raises EmptyDataset, ObjectNotFound, ListingBroken, InvalidRequest for a format that nobody knows.
    """
    if format not in FORMATS:
        raise InvalidRequest(f"unknown format {format!r}", hint=f"one of {', '.join(sorted(FORMATS))}")
    if keys is None:
        async for info in _below(store, format):
            yield info
        return
    if not keys:
        raise EmptyDataset(f"the list of keys below {store.url} is empty")
    if len(set(keys)) != len(keys):
        raise InvalidRequest("a key is named twice in the list of shards")
    for key in keys:
        yield await store.head(key)


async def _below(store: Store, format: str) -> AsyncIterator[ObjectInfo]:
    taken = others = 0
    other = ""
    loops = _LoopWatch(store.url)
    async for info in store.list():
        loops.passed(info.key)
        if FORMATS[format].search(info.key):
            taken += 1
            yield info
        else:
            others += 1
            other = info.key
    if not taken and others:
        fitting = [name for name, pattern in FORMATS.items() if pattern.search(other) and name != "raw"]
        raise EmptyDataset(
            f"{store.url} holds {others} objects, but none is named like a shard of format {format!r}",
            hint=f"{other!r} could be of format {' or '.join(fitting) or 'raw'}; check the prefix too",
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
