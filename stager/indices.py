"""Where samples lie in shards: kept on the node, and in the warm tier for the other nodes.

As of everything there, a copy in the warm tier that is missing, damaged or out of reach is a miss.
"""

from __future__ import annotations

import msgspec
import structlog
import xxhash

from forebay.stager.manifest import Shard
from forebay.stager.registry import Registry
from forebay.stager.warm import WarmTier

log = structlog.get_logger()


class _Copy(msgspec.Struct, array_like=True):
    samples: int
    digest: str
    payload: bytes


class Indices:
    """`cut` is the way in which a loader cuts shards into samples: any text of its own."""

    def __init__(self, registry: Registry, warm: WarmTier | None) -> None:
        self._registry = registry
        self._warm = warm

    async def bring(self, shard: Shard, cut: str) -> bool:
        """From the warm tier, if it is only there; whether that has it, or this node. No cut, no index."""
        if self._warm is None or not cut:
            return False
        if self._registry.samples(shard.id, cut) >= 0:
            return True
        data = await self._warm.index(_name(shard, cut))
        return data is not None and self._took(shard, cut, data)

    def open(self, shard: Shard, cut: str) -> int | None:
        """A descriptor; None when this node has none."""
        return self._registry.open_index(shard.id, cut) if cut else None

    async def add(self, shard: Shard, cut: str, samples: int, payload: bytes) -> None:
        self._registry.add_index(shard.id, cut, samples, payload)
        if self._warm:
            copy = _Copy(samples, xxhash.xxh3_128_hexdigest(payload), payload)
            await self._warm.put_index(_name(shard, cut), msgspec.msgpack.encode(copy))

    def _took(self, shard: Shard, cut: str, data: bytes) -> bool:
        try:
            copy = msgspec.msgpack.decode(data, type=_Copy)
        except msgspec.DecodeError:
            copy = None
        if copy is None or xxhash.xxh3_128_hexdigest(copy.payload) != copy.digest:
            log.warning("an index in the warm tier is damaged, the shard is indexed again", shard=shard.name)
            return False
        self._registry.add_index(shard.id, cut, copy.samples, copy.payload)
        return True


def _name(shard: Shard, cut: str) -> str:
    return f"{shard.id}-{xxhash.xxh3_64_hexdigest(cut.encode())}"
