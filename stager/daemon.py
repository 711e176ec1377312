"""stagerd: wiring, nothing else."""

from __future__ import annotations

import os
import socket

import anyio
import structlog

from forebay.core import channel
from forebay.core.config import Settings
from forebay.core.protocol import StagerStatus
from forebay.core.service import notify, own_directory
from forebay.stager.catalog import Catalog
from forebay.stager.hot import HotTier
from forebay.stager.jobs import StageJobs
from forebay.stager.plan import PlanBook
from forebay.stager.scheduler import Scheduler
from forebay.stager.sessions import Stager
from forebay.stager.sources import Sources
from forebay.tiers.memory import keep_freed_memory

log = structlog.get_logger()


async def main(settings: Settings) -> None:
    """Serve until cancelled. Raises AlreadyRunning when another daemon owns the hot directory."""
    keep_freed_memory(settings.transfer.inflight_bytes)
    with own_directory(settings.hot_dir), own_directory(settings.home / "stager"):
        catalog = Catalog(settings.home / "stager")
        plans = PlanBook()
        hot = HotTier(settings.hot_dir, settings.stager.capacity, settings.stager.reserve, catalog, plans)
        sources = Sources(settings)
        scheduler = Scheduler(hot, plans, sources, settings)

        def status(sessions: int) -> StagerStatus:
            return StagerStatus(
                pid=os.getpid(),
                node=socket.gethostname(),
                hot_dir=str(settings.hot_dir),
                warm_dir=str(settings.stager.warm_dir) if settings.stager.warm_dir else None,
                capacity_bytes=hot.capacity_bytes,
                held_bytes=hot.held_bytes,
                leased_bytes=hot.leased_bytes,
                reserved_bytes=hot.reserved_bytes,
                shards=len(hot),
                sessions=sessions,
                fetches=scheduler.fetches,
                fetched_cold_bytes=sources.fetched_bytes["cold"],
                fetched_warm_bytes=sources.fetched_bytes["warm"],
                evictions=hot.evictions,
            )

        try:
            async with anyio.create_task_group() as tasks:
                jobs = StageJobs(catalog, hot, plans, scheduler, tasks)
                stager = Stager(catalog, hot, plans, scheduler, sources, jobs, status)
                tasks.start_soon(scheduler.run)
                tasks.start_soon(hot.sweep)
                jobs.resume()
                async with await channel.listen(settings.stager_socket) as listener:
                    log.info("ready", socket=str(settings.stager_socket), hot=str(settings.hot_dir))
                    notify("READY=1")
                    await channel.serve(listener, "stagerd", stager.open_session)
        finally:
            catalog.close()
