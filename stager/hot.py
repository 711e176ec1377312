"""The hot tier: some disks as one, who has what open, and memory for what no disk can take.

Which disk a shard goes to is decided by its id alone (rendezvous hashing: D. Thaler, C. Ravishankar,
"A name-based mapping scheme for rendezvous", 1996), among those that work: a disk that fails takes
only its own share along.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import xxhash

from forebay.core import metrics
from forebay.core.config import Settings, StagerSettings
from forebay.core.errors import DiskFull, QuotaExceeded
from forebay.core.units import format_bytes
from forebay.stager.catalog import Catalog, Held
from forebay.stager.disk import HotDisk, allocated
from forebay.stager.evictor import Evictor
from forebay.stager.manifest import Shard
from forebay.stager.pins import Pins
from forebay.stager.plan import PlanBook
from forebay.tiers.landing import Fetched, Landing, MemoryLanding, opened_again


class HotTier:
    """All methods run on the daemon's event loop."""

    def __init__(self, settings: Settings, catalog: Catalog, plans: PlanBook, pins: Pins) -> None:
        self._settings = settings.stager
        self._catalog = catalog
        self._plans = plans
        self._pins = pins
        self._leases: Counter[str] = Counter()
        self._leased_bytes: dict[str, int] = {}
        self._where: dict[str, HotDisk | None] = {}
        self._memory: dict[str, Fetched] = {}
        self._promised_bytes: dict[str, int] = {}
        self._coming: dict[str, dict[str, int]] = {}
        share = self._settings.capacity // len(settings.hot_dirs)
        self.disks = [
            HotDisk(folder, share, self._settings, catalog, self._evictor(str(folder)))
            for folder in settings.hot_dirs
        ]
        self._by_name = {found.name: found for found in self.disks}
        pins.on_change = self._rank_again
        metrics.stager_capacity_bytes.set(self.capacity_bytes)

    def configure(self, settings: StagerSettings) -> None:
        """New limits; what is above them goes as room is needed."""
        self._settings = settings
        for disk in self.disks:
            disk.configure(settings, settings.capacity // len(self.disks))
        metrics.stager_capacity_bytes.set(self.capacity_bytes)

    def _evictor(self, disk: str) -> Evictor:
        return Evictor(disk, self._catalog, self._plans, self._leases.__contains__, self._pins.holds)

    def _rank_again(self) -> None:
        for disk in self.disks:
            disk.evictor.rank_again()

    # What is there

    @property
    def capacity_bytes(self) -> int:
        return sum(disk.capacity_bytes for disk in self.disks)

    @property
    def held_bytes(self) -> int:
        return sum(disk.held_bytes for disk in self.disks)

    @property
    def reserved_bytes(self) -> int:
        return sum(disk.reserved_bytes for disk in self.disks)

    @property
    def leased_bytes(self) -> int:
        return sum(self._leased_bytes.values())

    @property
    def evictions(self) -> int:
        return sum(disk.evictions for disk in self.disks)

    @property
    def overflow_bytes(self) -> int:
        """Memory that holds, or will hold, what no disk could take."""
        return sum(f.size_bytes for f in self._memory.values()) + sum(self._promised_bytes.values())

    def __len__(self) -> int:
        return self._catalog.totals().objects

    def __contains__(self, object_id: str) -> bool:
        return object_id in self._memory or self._held(object_id) is not None

    def _held(self, object_id: str) -> tuple[HotDisk, Held] | None:
        """Only what lies on a disk that works."""
        held = self._catalog.get(object_id)
        disk = self._by_name.get(held.disk) if held else None
        return (disk, held) if disk and held and disk.health.usable else None

    def ids(self) -> list[str]:
        """Of everything staged on disks that work."""
        return [i for disk in self.disks if disk.health.usable for i in self._catalog.ids(disk.name)]

    def where(self, object_id: str) -> tuple[Path, str] | None:
        """Path and digest of what is staged on a disk."""
        found = self._held(object_id)
        return (found[0].path(object_id), found[1].digest) if found else None

    async def open(self, object_id: str) -> tuple[int, str] | None:
        """A descriptor and a digest, or None: it has to be fetched."""
        if fetched := self._memory.get(object_id):
            assert fetched.fd is not None
            return opened_again(fetched.fd), fetched.digest
        if found := self._held(object_id):
            disk, held = found
            fd = await disk.open(held)
            if fd is not None:
                self._catalog.touch(object_id)
                if object_id in self._leases:
                    self._leased_bytes[object_id] = held.blocks_bytes
                return fd, held.digest
        return None

    def used(self, object_id: str) -> None:
        """A plan has passed it: its next use is another now."""
        if found := self._held(object_id):
            found[0].evictor.came(object_id)

    # Leases

    def lease(self, object_id: str) -> None:
        self._leases[object_id] += 1

    def release(self, object_id: str) -> None:
        self._leases[object_id] -= 1
        if self._leases[object_id] <= 0:
            del self._leases[object_id]
            self._leased_bytes.pop(object_id, None)
            self._drop_memory(object_id)
            self.used(object_id)

    def _drop_memory(self, object_id: str) -> None:
        if fetched := self._memory.pop(object_id, None):
            assert fetched.fd is not None
            os.close(fetched.fd)

    # Room

    def reserve(self, shard: Shard, next_use_bytes: float, tenant: str, *, must: bool) -> bool:
        """Take room for a shard, on a disk; False when that is not enough now.

        With `must`, a rank waits: what no disk can take goes to memory. Raises ShardTooLarge,
        QuotaExceeded, DiskFull.
        """
        over_quota_bytes = self._over_quota(shard, tenant)
        disk = self._disk_for(shard.id)
        problem: DiskFull | None = None
        if disk is not None:
            try:
                if disk.reserve(shard, next_use_bytes, tenant, over_quota_bytes):
                    self._where[shard.id] = disk
                    if tenant in self._settings.quotas:
                        self._coming.setdefault(tenant, {})[shard.id] = allocated(shard.size_bytes)
                    return True
                if disk.health.usable:
                    return False
            except DiskFull as err:
                problem = err
        if must and self.overflow_bytes + shard.size_bytes <= self._settings.overflow:
            metrics.stager_overflows.inc()
            self._where[shard.id] = None
            self._promised_bytes[shard.id] = shard.size_bytes
            return True
        raise problem or DiskFull(
            f"no disk of the hot tier works: {', '.join(d.name for d in self.disks)}",
            hint="look at the disks; forebay probes them and takes them back by itself",
        )

    def _disk_for(self, object_id: str) -> HotDisk | None:
        working = [disk for disk in self.disks if disk.health.usable]
        return max(working, key=lambda disk: _weight(disk.name, object_id), default=None)

    def _over_quota(self, shard: Shard, tenant: str) -> int:
        quota_bytes = self._settings.quotas.get(tenant)
        if quota_bytes is None:
            return 0
        need_bytes = allocated(shard.size_bytes)
        if need_bytes > quota_bytes:
            raise QuotaExceeded(
                f"{shard.name} takes {format_bytes(need_bytes)}, "
                f"the quota of {tenant!r} is {format_bytes(quota_bytes)}"
            )
        held_bytes = self._catalog.totals(tenant=tenant).blocks_bytes
        return held_bytes + sum(self._coming.get(tenant, {}).values()) + need_bytes - quota_bytes

    def landing(self, shard: Shard, tenant: str, *, soon: bool) -> Landing:
        """`soon`: a rank reads it next, so that it may as well come through the page cache."""
        disk = self._where[shard.id]
        return disk.landing(shard, tenant, direct=not soon) if disk else MemoryLanding()

    def cancel(self, shard: Shard, err: BaseException | None = None) -> None:
        """The fetch ended without a shard; `err` may tell of the disk."""
        self._arrived(shard)
        if disk := self._where.pop(shard.id, None):
            disk.cancel(shard)
            if isinstance(err, OSError):
                disk.failed(err)

    def together(self) -> AbstractContextManager[object]:
        """What is kept in this block is written down at once."""
        return self._catalog.together()

    def keep(self, shard: Shard, fetched: Fetched, tenant: str) -> None:
        self._arrived(shard)
        if disk := self._where.pop(shard.id):
            disk.keep(shard, fetched, tenant)
        else:
            self._memory[shard.id] = fetched
            if shard.id not in self._leases:
                self._drop_memory(shard.id)
        metrics.stager_hot_bytes.set(self.held_bytes)

    def _arrived(self, shard: Shard) -> None:
        """Or not: what was promised for it is no longer."""
        self._promised_bytes.pop(shard.id, None)
        for coming in self._coming.values():
            coming.pop(shard.id, None)

    def may_go(self, object_id: str) -> bool:
        """Neither in use nor pinned."""
        return object_id not in self._leases and not self._pins.holds(object_id)

    def evict(self, object_id: str) -> bool:
        """On request; False for what is in use or pinned."""
        if not self.may_go(object_id):
            return False
        if found := self._held(object_id):
            found[0].evict(found[1])
        return True

    def explain_full(self) -> str:
        """Who holds what, for the error of somebody who found no room."""
        tenants = ", ".join(
            f"{tenant} {format_bytes(self._catalog.totals(tenant=tenant).blocks_bytes)}"
            for tenant in self._settings.quotas
        )
        return (
            f"capacity {format_bytes(self.capacity_bytes)}, staged {format_bytes(self.held_bytes)} "
            f"of which in use {format_bytes(self.leased_bytes)} in {len(self._leased_bytes)} shards, "
            f"{self._pins.explain()}being fetched {format_bytes(self.reserved_bytes)}"
            f"{f'; by tenant: {tenants}' if tenants else ''}"
        )


def _weight(disk: str, object_id: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{disk}\0{object_id}".encode())
