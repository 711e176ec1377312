"""The shards of a dataset: in pages, and given up. A few at a time, so that others are served in between."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt
from anyio.lowlevel import checkpoint

from forebay.core.protocol import Evicted, ListShards, ShardPage, ShardState
from forebay.stager.hot import HotTier
from forebay.stager.manifest import Manifest

# Shards looked at for one page: a rare kind ends with a cursor, not with a timeout.
_LOOKED_AT = 16384
_AT_ONCE = 256


async def shard_page(wanted: ListShards, manifest: Manifest, hot: HotTier) -> ShardPage:
    """From after `wanted.after` until the page is full, or enough was looked at."""
    first = max(0, wanted.after + 1)
    found: list[ShardState] = []
    last = min(len(manifest), first + _LOOKED_AT)
    for start in range(first, last, _AT_ONCE):
        for shard in manifest.shards(np.arange(start, min(last, start + _AT_ONCE))):
            staged = shard.id in hot
            if wanted.staged in (None, staged) and fnmatchcase(shard.info.key, wanted.glob or "*"):
                found.append(
                    ShardState(shard.number, shard.info.key, shard.size_bytes, shard.info.version, staged)
                )
                if len(found) == wanted.limit:
                    return ShardPage(found, shard.number if shard.number + 1 < len(manifest) else None)
        await checkpoint()
    return ShardPage(found, last - 1 if last < len(manifest) else None)


async def give_up(
    manifest: Manifest, numbers: npt.NDArray[np.int64], hot: HotTier, *, dry_run: bool
) -> Evicted:
    """What is staged of these, but for what is in use or pinned."""
    gone = kept = 0
    for start in range(0, len(numbers), _AT_ONCE):
        with hot.together():
            some = manifest.shards(numbers[start : start + _AT_ONCE])
            staged = [shard.id for shard in some if shard.id in hot]
            went = sum(hot.may_go(id_) if dry_run else hot.evict(id_) for id_ in staged)
        gone += went
        kept += len(staged) - went
        await checkpoint()
    return Evicted(gone, kept)
