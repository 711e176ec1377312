"""Read again what lies there, slowly, the longest unread first; damage is taken out and fetched anew."""

from __future__ import annotations

import time

import anyio
import structlog

from forebay.core import metrics
from forebay.stager.catalog import Catalog
from forebay.stager.disk import HotDisk
from forebay.stager.hot import HotTier
from forebay.stager.scheduler import Scheduler
from forebay.tiers.budget import TokenBucket

log = structlog.get_logger()

_ROUND_S = 60.0
_LEAST_AGE_S = 86_400.0


class Scrubber:
    """One object at a time, at most `rate_bps`; each object at most once a day."""

    def __init__(self, hot: HotTier, catalog: Catalog, scheduler: Scheduler, rate_bps: float) -> None:
        self._hot = hot
        self._catalog = catalog
        self._scheduler = scheduler
        self.rate = TokenBucket(rate_bps)

    async def run(self) -> None:
        while True:
            await anyio.sleep(_ROUND_S)
            if self.rate.rate_bps:
                for disk in self._hot.disks:
                    await self._read_again(disk, time.time() - _LEAST_AGE_S)

    async def _read_again(self, disk: HotDisk, before: float) -> None:
        for listed in self._catalog.least_verified(disk.name):
            if not disk.health.usable or listed.verified_at > before:
                return
            held = self._catalog.get(listed.id)
            if held is None:
                continue
            await anyio.sleep(self.rate.opens_in_s())
            self.rate.take(held.size_bytes)
            sound = await disk.sound(held)
            metrics.stager_scrubbed_bytes.inc(held.size_bytes)
            if not sound and self._catalog.get(held.id):
                disk.quarantine(held)
                # What a plan still comes to is fetched again.
                self._scheduler.lost()
