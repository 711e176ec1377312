"""The hot tier: a directory on local NVMe that stagerd alone owns.

Everything lives below <hot>/forebay/objects/<aa>/<id>; nothing else on the disk is ever touched,
and links there are never followed (S2). Space is reserved before a byte is fetched (S4).
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import Counter
from pathlib import Path

import structlog
from anyio import to_thread

from forebay.core import metrics
from forebay.core.errors import DiskFull, ShardTooLarge
from forebay.core.service import boot_id
from forebay.core.units import format_bytes
from forebay.stager.catalog import Catalog, Held
from forebay.stager.evictor import victims
from forebay.stager.manifest import Shard
from forebay.stager.plan import PlanBook
from forebay.tiers.digest import digest_fd
from forebay.tiers.filesystem import OWN_TEMPORARY, TEMPORARY
from forebay.tiers.transfer import Fetched

log = structlog.get_logger()

_OBJECT_NAME = re.compile(r"[0-9a-f]{32}")
# What a file may take beyond its length: it is counted in blocks (S4).
_BLOCK_BYTES = 4096


def allocated(size_bytes: int) -> int:
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


class HotTier:
    """Counts, opens, leases, evicts. All methods run on the daemon's event loop."""

    def __init__(
        self, folder: Path, capacity_bytes: int, reserve_bytes: int, catalog: Catalog, plans: PlanBook
    ) -> None:
        self.root = folder / "forebay" / "objects"
        self.root.mkdir(parents=True, exist_ok=True)
        self.capacity_bytes = capacity_bytes
        self._reserve_bytes = reserve_bytes
        self._catalog = catalog
        self._plans = plans
        self._boot = boot_id()
        self._held = catalog.held()
        self.held_bytes = sum(held.blocks_bytes for held in self._held.values())
        self._leases: Counter[str] = Counter()
        self._reserved: dict[str, int] = {}
        self.evictions = 0
        metrics.stager_capacity_bytes.set(capacity_bytes)
        self._gauge()

    # What is there

    @property
    def reserved_bytes(self) -> int:
        return sum(self._reserved.values())

    @property
    def leased_bytes(self) -> int:
        return sum(self._held[i].blocks_bytes for i in self._leases if i in self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, object_id: str) -> bool:
        return object_id in self._held

    def path(self, object_id: str) -> Path:
        return self.root / object_id[:2] / object_id

    async def open(self, object_id: str) -> tuple[int, Held] | None:
        """A descriptor of a staged object, or None: a file that is gone or damaged is a miss.

        A file from another boot of the machine was perhaps never flushed: verified on first use (S3).
        """
        held = self._held.get(object_id)
        if held is None:
            return None
        try:
            fd = os.open(self.path(object_id), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as err:
            log.warning("staged file lost", object=object_id, error=str(err))
            self._forget(object_id)
            return None
        try:
            sound = os.fstat(fd).st_size == held.size_bytes
            if sound and held.boot_id != self._boot:
                sound = await to_thread.run_sync(digest_fd, fd) == held.digest
                held.boot_id = self._boot
            if sound:
                held.used_at = time.time()
                self._catalog.put_object(held)
                return os.dup(fd), held
        finally:
            os.close(fd)
        log.warning("staged file damaged", object=object_id)
        self._evict(held)
        return None

    # Leases

    def lease(self, object_id: str) -> None:
        self._leases[object_id] += 1

    def release(self, object_id: str) -> None:
        self._leases[object_id] -= 1
        if self._leases[object_id] <= 0:
            del self._leases[object_id]

    # Room

    def reserve(self, shard: Shard, next_use_bytes: float) -> bool:
        """Take room for a shard, giving up others that are used later; False when that is not enough.

        Raises ShardTooLarge, and DiskFull when it is strangers' files that leave no room.
        """
        need_bytes = allocated(shard.size_bytes)
        if need_bytes > self.capacity_bytes:
            raise ShardTooLarge(
                f"{shard.name} takes {format_bytes(need_bytes)}, "
                f"the hot tier holds {format_bytes(self.capacity_bytes)} in all",
                hint="raise stager.capacity, or write smaller shards",
            )
        over_capacity = self.held_bytes + self.reserved_bytes + need_bytes - self.capacity_bytes
        short_on_disk = need_bytes - self._free_on_disk()
        missing = max(over_capacity, short_on_disk)
        if missing > 0:
            idle = [held for held in self._held.values() if held.id not in self._leases]
            chosen = victims(idle, missing, self._plans.next_use_bytes, next_use_bytes)
            if chosen is None:
                if short_on_disk > 0 and not self._held and not self._reserved:
                    raise DiskFull(
                        f"{self.root} has no room for {shard.name} ({format_bytes(need_bytes)}) "
                        f"above the reserve of {format_bytes(self._reserve_bytes)}"
                    )
                return False
            for held in chosen:
                self._evict(held)
                self.evictions += 1
                metrics.stager_evictions.inc()
        self._reserved[shard.id] = need_bytes
        return True

    def cancel(self, shard: Shard) -> None:
        self._reserved.pop(shard.id, None)

    def keep(self, shard: Shard, fetched: Fetched) -> None:
        """The reservation becomes a staged object."""
        self._reserved.pop(shard.id, None)
        held = Held(
            shard.id, fetched.size_bytes, fetched.blocks_bytes, fetched.digest, self._boot, time.time()
        )
        self._held[shard.id] = held
        self.held_bytes += held.blocks_bytes
        self._catalog.put_object(held)
        self._gauge()

    def explain_full(self) -> str:
        """Who holds what, for the error of somebody who found no room."""
        return (
            f"capacity {format_bytes(self.capacity_bytes)}, staged {format_bytes(self.held_bytes)} "
            f"of which in use {format_bytes(self.leased_bytes)} "
            f"in {len(self._leases.keys() & self._held.keys())} shards, "
            f"being fetched {format_bytes(self.reserved_bytes)}"
        )

    def _free_on_disk(self) -> int:
        disk = os.statvfs(self.root)
        # Reserved files are allocated as soon as their fetch begins, perhaps not yet: count them fully.
        return disk.f_bavail * disk.f_frsize - self._reserve_bytes - self.reserved_bytes

    def _evict(self, held: Held) -> None:
        self.path(held.id).unlink(missing_ok=True)
        self._forget(held.id)

    def _forget(self, object_id: str) -> None:
        if gone := self._held.pop(object_id, None):
            self.held_bytes -= gone.blocks_bytes
        self._catalog.drop_object(object_id)
        self._gauge()

    def _gauge(self) -> None:
        metrics.stager_hot_bytes.set(self.held_bytes)

    # After a crash

    async def sweep(self) -> None:
        """Remove what a dead daemon left half done: temporaries and files without a catalog entry.

        Only regular files with names that stagerd gives, below its own directory.
        """
        for folder in await to_thread.run_sync(_children, self.root):
            if folder.is_symlink() or not folder.is_dir():
                continue
            for path in await to_thread.run_sync(_children, folder):
                if self._is_orphan(path):
                    path.unlink(missing_ok=True)
                    log.info("swept", path=str(path))

    def _is_orphan(self, path: Path) -> bool:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        if path.name.startswith(TEMPORARY):
            return not path.name.startswith(OWN_TEMPORARY)
        known = path.name in self._held or path.name in self._reserved
        return bool(_OBJECT_NAME.fullmatch(path.name)) and not known


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())
