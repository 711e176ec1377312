"""What goes on beside the serving: take stock after a start, look after failing disks, write recency down."""

from __future__ import annotations

import anyio

from forebay.stager.catalog import Catalog
from forebay.stager.disk import HotDisk
from forebay.stager.hot import HotTier
from forebay.stager.scheduler import Scheduler
from forebay.stager.sweep import sweep

_FLUSH_S = 5.0


class Upkeep:
    def __init__(self, hot: HotTier, catalog: Catalog, scheduler: Scheduler) -> None:
        self._hot = hot
        self._catalog = catalog
        self._scheduler = scheduler

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            for disk in self._hot.disks:
                tasks.start_soon(self._disk, disk)
            tasks.start_soon(self._now_and_then)

    async def _disk(self, disk: HotDisk) -> None:
        await sweep(disk, self._catalog)
        self._scheduler.poke()
        while True:
            await disk.health.went_out()
            self._scheduler.lost()
            await disk.look_after()
            disk.untidy = True
            self._scheduler.poke()

    async def _now_and_then(self) -> None:
        while True:
            await anyio.sleep(_FLUSH_S)
            self._catalog.flush()
            for disk in self._hot.disks:
                await disk.clear()
                if disk.untidy and disk.health.usable:
                    disk.untidy = False
                    await sweep(disk, self._catalog)
