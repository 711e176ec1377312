"""Where a shard comes from: the warm tier when it has it, else its cold source."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.core import metrics
from forebay.core.config import Settings
from forebay.stager.manifest import Shard
from forebay.stager.warm import WarmTier
from forebay.tiers.store import Store, normalize_url, open_store
from forebay.tiers.transfer import Fetched, Transfers

Tier = Literal["cold", "warm"]


@dataclass(frozen=True)
class Brought:
    file: Fetched
    tier: Tier


class Sources:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._transfers = Transfers(settings.transfer)
        self._stores: dict[str, Store] = {}
        self.fetched_bytes: Counter[Tier] = Counter()
        warm_dir = settings.stager.warm_dir
        self._warm = WarmTier(warm_dir, self._transfers) if warm_dir else None

    def store(self, url: str) -> Store:
        """One per URL, so that connections are reused."""
        url = normalize_url(url)
        if url not in self._stores:
            self._stores[url] = open_store(url, self._settings)
        return self._stores[url]

    async def fetch(self, shard: Shard, final: Path) -> Brought:
        if self._warm and (file := await self._warm.fetch(shard, final)):
            return self._counted(Brought(file, "warm"))
        file = await self._transfers.fetch(self.store(shard.url), shard.info, final)
        return self._counted(Brought(file, "cold"))

    async def publish(self, shard: Shard, brought: Brought) -> None:
        """Leave a copy for the other nodes, once the shard serves here."""
        if self._warm and brought.tier == "cold":
            await self._warm.publish(shard, brought.file)

    def _counted(self, brought: Brought) -> Brought:
        self.fetched_bytes[brought.tier] += brought.file.size_bytes
        metrics.stager_fetched_bytes.labels(brought.tier).inc(brought.file.size_bytes)
        return brought
