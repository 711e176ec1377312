"""The warm tier: a store that the nodes share, read before cold and filled after it.

<warm>/forebay/objects/<aa>/<id>, same names as hot, beside each an `<id>.digest` (xxh3-128) that is
written after the data and so vouches for it; `indices/` says where samples lie in them. Whatever goes
wrong here is a miss: it is counted, said once, and cold serves. Capacity is kept by the nodes together:
each counts, and gives up what was published longest ago; two that do so at once delete the same.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal, TypeVar

import anyio
import msgspec
import structlog

from forebay.core import metrics
from forebay.core.config import WarmSettings
from forebay.core.errors import DigestMismatch, ForebayError, ObjectNotFound, StoreUnreachable
from forebay.core.units import format_bytes
from forebay.stager.coordination import Coordinator
from forebay.stager.manifest import Shard
from forebay.tiers.budget import Class, Ticket
from forebay.tiers.flow import Flow
from forebay.tiers.landing import Fetched, Landing
from forebay.tiers.store import ObjectInfo, Store
from forebay.tiers.transfer import Transfers

log = structlog.get_logger()
T = TypeVar("T")
Action = Literal["read", "write", "claim", "trim"]
Claim = Literal["mine", "there", "taken"]

_PART_BYTES = 16 << 20
_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
# Of what a rank waits for.
_URGENT_POLL_S = 0.1
_COUNT_AGAIN_S = 60.0
_TRIM_TO = 0.9
# After a failure the tier is left alone for a while, so that each fetch does not wait for it in vain.
_REST_S = 30.0
# A write slower than this has hung.
_SLOWEST_BPS = 1e6


class WarmTier:
    def __init__(
        self, store: Store, flow: Flow, coordinator: Coordinator, transfers: Transfers, settings: WarmSettings
    ) -> None:
        self._store = store
        self._flow = flow
        self._coordinator = coordinator
        self._transfers = transfers
        self._settings = settings
        self._mine: set[str] = set()
        self._resting_until: dict[Action, float] = {}
        self._said: set[Action] = set()
        self._size_bytes = self._published = 0
        self._trimming = anyio.Lock()
        self._counted_at = -_COUNT_AGAIN_S

    async def fetch(self, shard: Shard, landing: Callable[[], Landing], ticket: Ticket) -> Fetched | None:
        """Warm -> hot, verified against the sidecar; None when it is not (or not well) there."""
        found = await self._guarded("read", lambda: self._look(shard))
        if not found:
            return None
        info, digest = found
        try:
            return await self._transfers.fetch(self._store, self._flow, info, landing, ticket, digest)
        except DigestMismatch:
            log.warning("warm copy is damaged, dropped", object=shard.id)
            await self._guarded("write", lambda: self._delete(shard.id))
        except ForebayError as err:
            self._failed("read", err)
        return None

    async def has(self, shard: Shard) -> bool:
        return await self._guarded("read", lambda: self._look(shard)) is not None

    async def _look(self, shard: Shard) -> tuple[ObjectInfo, str] | None:
        """What is there, if it is whole."""
        digest = await self._small(f"{_key(shard.id)}.digest")
        if digest is None:
            return None
        try:
            info = await self._store.head(_key(shard.id))
        except ObjectNotFound:
            return None
        # An MD5 of the store adds nothing to the digest that was taken from the source's bytes.
        if info.size_bytes != shard.size_bytes:
            return None
        return msgspec.structs.replace(info, md5=None), digest.decode().strip()

    async def claim(self, shard: Shard) -> Claim:
        """Is this node to fetch the shard from cold? When coordinating fails, everybody may."""
        return await self._guarded("claim", lambda: self._claim(shard)) or "mine"

    async def others(self, shard: Shard, ticket: Ticket, limit_s: float) -> bool:
        """Wait while another node fetches it: until it is here, or its claim is free, or was taken over.

        False when that takes longer than the limit: then both may fetch.
        """
        with anyio.move_on_after(limit_s) as limit:
            await self._guarded("claim", lambda: self._wait_for(shard, ticket), math.inf)
        return not limit.cancelled_caught

    async def release(self, shard: Shard) -> None:
        """The claim, if it is this node's, goes back."""
        if shard.id in self._mine:
            self._mine.discard(shard.id)
            with anyio.CancelScope(shield=True):
                await self._guarded("claim", lambda: self._coordinator.release(shard.id))

    async def run(self) -> None:
        """Signs of life for every claim that is held."""
        while True:
            await anyio.sleep(self._settings.heartbeat_s)
            for object_id in list(self._mine):
                await self._guarded("claim", partial(self._coordinator.beat, object_id))

    async def _claim(self, shard: Shard) -> Claim:
        if shard.id in self._mine:
            return "mine"
        mine = await self._coordinator.claim(shard.id)
        # Somebody may have finished between the look and the claim.
        if await self._look(shard):
            if mine:
                await self._coordinator.release(shard.id)
            return "there"
        if mine:
            self._mine.add(shard.id)
        return "mine" if mine else "taken"

    async def _wait_for(self, shard: Shard, ticket: Ticket) -> None:
        seen: str | None = None
        seen_at, pause_s = time.monotonic(), _POLL_S
        while not await self._look(shard):
            sign = await self._coordinator.sign(shard.id)
            if sign is None:
                await anyio.sleep(_POLL_S)
                return
            if sign != seen:
                seen, seen_at = sign, time.monotonic()
            elif time.monotonic() - seen_at > self._settings.stale_s:
                log.warning("claim of a silent node taken over", object=shard.id, owner=seen)
                metrics.warm_takeovers.inc()
                if await self._coordinator.take_over(shard.id, seen):
                    self._mine.add(shard.id)
                    return
            # No file system tells another node that a name appeared: it has to be looked for.
            longest_s = _URGENT_POLL_S if ticket.cls <= Class.RESTORE else _LONGEST_POLL_S
            pause_s = min(pause_s * 1.5, longest_s)
            with anyio.move_on_after(random.uniform(0.5, 1.0) * pause_s):
                await ticket.raised.wait()

    async def publish(self, shard: Shard, fetched: Fetched) -> None:
        """Hot -> warm, for the other nodes: the data, then what vouches for it."""
        path = fetched.path
        if path is None:
            return

        async def write() -> None:
            await self._store.put_file(_key(shard.id), path, part_bytes=_PART_BYTES)
            await self._store.put(f"{_key(shard.id)}.digest", f"{fetched.digest}\n".encode())
            self._size_bytes += fetched.size_bytes
            self._published += 1

        limit_s = self._settings.timeout_s + fetched.size_bytes / _SLOWEST_BPS
        await self._guarded("write", write, limit_s)
        await self._guarded("trim", self._trim, limit_s)
        await self.release(shard)

    async def index(self, name: str) -> bytes | None:
        """What `put_index` left there."""
        return await self._guarded("read", lambda: self._small(f"indices/{name[:2]}/{name}"))

    async def put_index(self, name: str, data: bytes) -> None:
        """Beside the objects, and not counted with them."""
        await self._guarded("write", lambda: self._store.put(f"indices/{name[:2]}/{name}", data))

    async def _small(self, key: str) -> bytes | None:
        try:
            info = await self._store.head(key)
            return bytes(await self._store.read(info, 0, info.size_bytes))
        except ObjectNotFound:
            return None

    async def _trim(self) -> None:
        """Keep below the capacity, by what was published longest ago."""
        capacity_bytes = self._settings.capacity
        async with self._trimming:
            while capacity_bytes and (
                self._size_bytes > capacity_bytes or time.monotonic() - self._counted_at > _COUNT_AGAIN_S
            ):
                published = self._published
                await self._trim_to(capacity_bytes)
                if published == self._published:
                    return
                # What came while it was counted may be missing from the count.
                self._size_bytes = capacity_bytes + 1

    async def _trim_to(self, capacity_bytes: int) -> None:
        found = [info async for info in self._store.list("objects/") if len(info.key) == _KEY_LENGTH]
        size_bytes = sum(info.size_bytes for info in found)
        if size_bytes > capacity_bytes:
            for info in sorted(found, key=lambda info: info.changed_at):
                if size_bytes <= capacity_bytes * _TRIM_TO:
                    break
                await self._delete(info.key.rpartition("/")[2])
                size_bytes -= info.size_bytes
            log.info("warm tier trimmed", size=format_bytes(size_bytes))
        self._size_bytes, self._counted_at = size_bytes, time.monotonic()
        metrics.warm_bytes.set(size_bytes)

    async def _delete(self, object_id: str) -> None:
        """First what vouches for it."""
        await self._store.delete(f"{_key(object_id)}.digest")
        await self._store.delete(_key(object_id))

    async def _guarded(
        self, action: Action, call: Callable[[], Awaitable[T]], limit_s: float | None = None
    ) -> T | None:
        """Nothing that goes wrong in the warm tier is more than a miss."""
        if time.monotonic() < self._resting_until.get(action, 0.0):
            return None
        try:
            with anyio.fail_after(limit_s or self._settings.timeout_s):
                result = await call()
        except TimeoutError:
            self._failed(action, StoreUnreachable(f"{self._store.url} did not answer in time"))
            return None
        except ForebayError as err:
            self._failed(action, err)
            return None
        self._said.discard(action)
        return result

    def _failed(self, action: Action, err: ForebayError) -> None:
        metrics.warm_errors.labels(action).inc()
        self._resting_until[action] = time.monotonic() + _REST_S
        if action not in self._said:
            self._said.add(action)
            log.warning("warm tier fails, going on without it", action=action, error=str(err))


def _key(object_id: str) -> str:
    return f"objects/{object_id[:2]}/{object_id}"


_KEY_LENGTH = len(_key("0" * 32))
