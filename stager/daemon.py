"""stagerd: wiring, nothing else."""

from __future__ import annotations

import os

import anyio
import structlog

from forebay.core import channel
from forebay.core.config import Settings
from forebay.core.journal import Journal
from forebay.core.protocol import DiskStatus, SourceStatus, StagerStatus
from forebay.core.redact import redacted
from forebay.core.service import own_directories
from forebay.core.systemd import notify
from forebay.stager.catalog import Catalog
from forebay.stager.claims import IndexClaims
from forebay.stager.hot import HotTier
from forebay.stager.indices import Indices
from forebay.stager.jobbook import JobBook
from forebay.stager.jobs import StageJobs
from forebay.stager.once import OnceBook
from forebay.stager.pins import Pins
from forebay.stager.plan import PlanBook
from forebay.stager.ranks import RankBoard
from forebay.stager.registry import Registry
from forebay.stager.scheduler import Scheduler
from forebay.stager.schema import MIGRATIONS
from forebay.stager.scrubber import Scrubber
from forebay.stager.sessions import Stager
from forebay.stager.sources import Sources
from forebay.stager.upkeep import Upkeep
from forebay.tiers.budget import Gate
from forebay.tiers.memory import keep_freed_memory

log = structlog.get_logger()


class Stagerd:
    """`main` serves, `drain` comes before its end, `reload` takes new limits (core.service)."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.gate = Gate(settings.transfer.inflight_bytes, settings.network.rate)

    async def main(self) -> None:
        """Serve until cancelled. Raises AlreadyRunning when another daemon owns a hot directory."""
        settings = self.settings
        keep_freed_memory(settings.transfer.inflight_bytes)
        home = settings.home / "stager"
        with own_directories(home, *settings.hot_dirs):
            journal = Journal(home / "catalog.db", MIGRATIONS, durable=False)
            catalog, registry = Catalog(journal), Registry(journal, home)
            plans, pins = PlanBook(), Pins(journal, registry)
            self.hot = HotTier(settings, catalog, plans, pins)
            self.sources = Sources(settings, self.gate)
            self.scheduler = Scheduler(self.hot, plans, self.sources, self.gate, settings)
            self.scrubber = Scrubber(self.hot, catalog, self.scheduler, settings.stager.scrub_rate)
            try:
                async with anyio.create_task_group() as tasks:
                    jobs = StageJobs(
                        JobBook(journal), registry, self.hot, plans, pins, self.scheduler, tasks,
                        has_warm=self.sources.warm is not None,
                    )  # fmt: skip
                    indices = Indices(registry, self.sources.warm)
                    stager = Stager(
                        registry, self.hot, plans, pins, self.scheduler, self.sources, self.gate, jobs,
                        IndexClaims(registry, indices), indices, OnceBook(journal), RankBoard(settings.node),
                        self.status,
                    )  # fmt: skip
                    tasks.start_soon(self.scheduler.run)
                    tasks.start_soon(Upkeep(self.hot, catalog, self.scheduler).run)
                    tasks.start_soon(self.scrubber.run)
                    if self.sources.warm:
                        tasks.start_soon(self.sources.warm.run)
                    jobs.resume()
                    async with await channel.listen(settings.stager_socket) as listener:
                        log.info("ready", socket=str(settings.stager_socket), hot=self._folders())
                        notify("READY=1")
                        await channel.serve(listener, "stagerd", stager.open_session)
            finally:
                catalog.flush()
                journal.close()

    async def drain(self) -> None:
        """Let the ranges on their way come to their end; what is not there by then is fetched again."""
        await self.gate.close(self.settings.stager.drain_s)

    def reload(self) -> None:
        """Limits and rates as they stand in the settings now; directories and sockets need a restart."""
        self.settings = Settings.load(home=self.settings.home)
        self.gate.configure(self.settings.transfer.inflight_bytes, self.settings.network.rate)
        self.hot.configure(self.settings.stager)
        self.sources.configure(self.settings)
        self.scheduler.configure(self.settings)
        self.scrubber.rate.rate_bps = self.settings.stager.scrub_rate
        log.info("reloaded")

    def _folders(self) -> list[str]:
        return [str(folder) for folder in self.settings.hot_dirs]

    def status(self, sessions: int, read_bytes: int) -> StagerStatus:
        disks = [
            DiskStatus(d.name, d.health.state, d.capacity_bytes, d.held_bytes, d.health.failures)
            for d in self.hot.disks
        ]
        sources = [
            SourceStatus(f.name, int(f.window), f.throttled, f.hedged) for f in self.sources.flows.values()
        ]
        return StagerStatus(
            pid=os.getpid(),
            node=self.settings.node,
            disks=disks,
            sources=sources,
            warm=self.settings.warm.url and redacted(self.settings.warm.url),
            capacity_bytes=self.hot.capacity_bytes,
            held_bytes=self.hot.held_bytes,
            leased_bytes=self.hot.leased_bytes,
            reserved_bytes=self.hot.reserved_bytes,
            shards=len(self.hot),
            sessions=sessions,
            fetches=self.scheduler.fetches,
            fetched_cold_bytes=self.sources.fetched_bytes["cold"],
            fetched_warm_bytes=self.sources.fetched_bytes["warm"],
            evictions=self.hot.evictions,
            overflow_bytes=self.hot.overflow_bytes,
            read_bytes=read_bytes,
        )
