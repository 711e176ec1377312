"""The shards of a dataset in pages, each with whether it is staged."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np

from forebay.core.protocol import ListShards, ShardPage, ShardState
from forebay.stager.hot import HotTier
from forebay.stager.manifest import Manifest

# Shards looked at for one page: a rare kind must not hold up everybody else.
_LOOKED_AT = 16384


def shard_page(wanted: ListShards, manifest: Manifest, hot: HotTier) -> ShardPage:
    """From after `wanted.after` until the page is full, or enough was looked at."""
    first = max(0, wanted.after + 1)
    found: list[ShardState] = []
    last = min(len(manifest), first + _LOOKED_AT)
    for shard in manifest.shards(np.arange(first, last)):
        staged = shard.id in hot
        if wanted.staged in (None, staged) and fnmatchcase(shard.info.key, wanted.glob or "*"):
            found.append(
                ShardState(shard.number, shard.info.key, shard.size_bytes, shard.info.version, staged)
            )
            if len(found) == wanted.limit:
                last = shard.number + 1
                break
    return ShardPage(found, last - 1 if last < len(manifest) else None)
