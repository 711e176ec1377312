"""Who indexes which shard: each shard once per node, the others wait for that result (F6)."""

from __future__ import annotations

import anyio

from forebay.stager.indices import Indices
from forebay.stager.manifest import Shard
from forebay.stager.registry import Registry


class IndexClaims:
    """Claims belong to sessions; a session that dies gives its claims back."""

    def __init__(self, registry: Registry, indices: Indices) -> None:
        self._registry = registry
        self._indices = indices
        self._owners: dict[tuple[str, str], int] = {}
        # Of a listing and a way to cut: the first of its shards that is not indexed lies no earlier.
        self._indexed_below: dict[tuple[str, str], int] = {}
        self._changed = anyio.Event()

    async def claim(self, session: int, dataset_id: str, index: str) -> int | None:
        """A shard that nobody has indexed that way or is indexing; None when all are indexed."""
        manifest, known = self._registry.manifest(dataset_id), (dataset_id, index)
        while True:
            changed = self._changed
            first = len(manifest)
            for number in range(self._indexed_below.get(known, 0), len(manifest)):
                shard = manifest.shard(number)
                if self._registry.samples(shard.id, index) >= 0:
                    continue
                if (shard.id, index) not in self._owners:
                    self._owners[shard.id, index] = session
                    if await self._indices.bring(shard, index):
                        # Another node has told.
                        self.indexed(shard, index)
                        continue
                    self._indexed_below[known] = min(first, number)
                    return number
                first = min(first, number)
            self._indexed_below[known] = first
            if first == len(manifest):
                return None
            await changed.wait()

    def indexed(self, shard: Shard, index: str) -> None:
        self._owners.pop((shard.id, index), None)
        self._wake()

    def drop(self, session: int) -> None:
        self._owners = {shard: owner for shard, owner in self._owners.items() if owner != session}
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
