"""Where a shard comes from: the warm tier when it has it, else its cold source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from forebay.core import metrics
from forebay.core.config import Settings
from forebay.core.errors import StoreError
from forebay.stager.coordination import open_coordinator
from forebay.stager.manifest import Shard
from forebay.stager.warm import Claim, WarmTier
from forebay.tiers.budget import Gate, Ticket
from forebay.tiers.flow import Flow, Open
from forebay.tiers.landing import Fetched, Landing
from forebay.tiers.store import Store, normalize_url, open_store
from forebay.tiers.transfer import Transfers

Tier = Literal["cold", "warm"]
_OPEN = Open()


@dataclass(frozen=True)
class Brought:
    file: Fetched
    tier: Tier


class Sources:
    def __init__(self, settings: Settings, gate: Gate) -> None:
        self._settings = settings
        self._gate = gate
        self._transfers = Transfers(settings.transfer, gate)
        self._stores: dict[str, Store] = {}
        self.flows: dict[str, Flow] = {}
        self.fetched_bytes: Counter[Tier] = Counter()
        # Not bytes: shards that this node has claimed and that are not here yet.
        self._claims = Gate(2)
        self.warm = self._open_warm(settings.warm.url) if settings.warm.url else None

    def configure(self, settings: Settings) -> None:
        """New rates and windows; stores stay as they were opened."""
        self._settings = settings
        for flow in self.flows.values():
            source = settings.source_of(flow.name)
            flow.most, flow.rate.rate_bps = source.concurrency, source.rate

    def _open_warm(self, url: str) -> WarmTier:
        url = f"{normalize_url(url)}/forebay"
        store, warm = self.store(url), self._settings.warm
        coordinator = open_coordinator(warm.coordinator, store, warm.stale_s)
        return WarmTier(store, self.flow(url), coordinator, self._transfers, warm)

    def store(self, url: str) -> Store:
        """One per URL, so that connections are reused."""
        url = normalize_url(url)
        if url not in self._stores:
            self._stores[url] = open_store(url, self._settings)
        return self._stores[url]

    def flow(self, url: str) -> Flow:
        """One per server and bucket: what throttles is shared by all prefixes below."""
        parts = urlsplit(normalize_url(url))
        name = f"{parts.scheme}://{parts.netloc}"
        source = self._settings.source_of(url)
        if source.url != url:
            name = source.url
        if name not in self.flows:
            self.flows[name] = Flow(name, source.concurrency, source.rate)
        return self.flows[name]

    async def fetch(
        self,
        shard: Shard,
        landing: Callable[[], Landing],
        ticket: Ticket,
        elsewhere: Callable[[], AbstractContextManager[None]],
    ) -> Brought:
        """Bring a shard to a landing. `elsewhere` is entered while another node is at it."""
        if not self.warm:
            return await self._from_cold(shard, landing, ticket)
        claim: Claim = "taken"
        while True:
            if file := await self.warm.fetch(shard, landing, ticket):
                return self._counted(Brought(file, "warm"))
            if claim == "there":
                # And cannot be read.
                return await self._from_cold(shard, landing, ticket)
            # What is claimed is fetched soon: the rest is left to nodes that have more room.
            self._claims.configure(max(2, int(self.flow(shard.url).window)), 0)
            async with self._claims.turn(_OPEN, ticket, 1):
                claim = await self.warm.claim(shard)
                if claim == "mine":
                    return await self._claimed(self.warm, shard, landing, ticket)
            if claim == "taken":
                with elsewhere():
                    came = await self.warm.others(shard, ticket, self._settings.stager.wait_s / 2)
                if not came:
                    return await self._from_cold(shard, landing, ticket)

    async def _claimed(
        self, warm: WarmTier, shard: Shard, landing: Callable[[], Landing], ticket: Ticket
    ) -> Brought:
        try:
            return await self._from_cold(shard, landing, ticket)
        except BaseException:
            await warm.release(shard)
            raise

    async def _from_cold(self, shard: Shard, landing: Callable[[], Landing], ticket: Ticket) -> Brought:
        store, flow = self.store(shard.url), self.flow(shard.url)
        return self._counted(
            Brought(await self._transfers.fetch(store, flow, shard.info, landing, ticket), "cold")
        )

    async def fetch_small(
        self, shards: list[Shard], landing: Callable[[Shard], Landing], ticket: Ticket
    ) -> list[Brought | None]:
        """Small shards of one source together, from cold; None for one that has to be fetched alone."""
        store, flow = self.store(shards[0].url), self.flow(shards[0].url)
        items = [(shard.info, landing(shard)) for shard in shards]
        files = await self._transfers.fetch_small(store, flow, items, ticket)
        return [self._counted(Brought(file, "cold")) if file else None for file in files]

    async def publish(self, shard: Shard, brought: Brought) -> None:
        """Leave a copy for the other nodes, once the shard serves here."""
        if self.warm and brought.tier == "cold":
            await self.warm.publish(shard, brought.file)

    async def ensure_warm(self, shard: Shard, path: Path, digest: str) -> None:
        """For a job whose target is the warm tier: what is staged here goes there too."""
        if self.warm and not await self.warm.has(shard):
            await self.warm.publish(shard, Fetched(shard.size_bytes, 0, digest, path=path))
            if not await self.warm.has(shard):
                raise StoreError(f"{shard.name} did not reach the warm tier", hint="the log says why")

    def _counted(self, brought: Brought) -> Brought:
        self.fetched_bytes[brought.tier] += brought.file.size_bytes
        metrics.stager_fetched_bytes.labels(brought.tier).inc(brought.file.size_bytes)
        return brought
