"""One directory of the hot tier, on one disk, owned by stagerd alone.

Everything lives below <hot>/forebay/objects/<aa>/<id>; nothing else there is ever touched, and links
are never followed (S2). Space is reserved before a byte is fetched (S4). A disk that fails or stalls
is a miss: what it held is fetched again, elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import numpy as np
import numpy.typing as npt
import structlog
from anyio import to_thread

from forebay.core import metrics
from forebay.core.config import StagerSettings
from forebay.core.errors import DiskFull, ShardTooLarge
from forebay.core.failpoint import failpoint
from forebay.core.service import boot_id
from forebay.core.units import format_bytes
from forebay.stager.catalog import Catalog, Held
from forebay.stager.evictor import Evictor
from forebay.stager.health import Health, probe
from forebay.stager.manifest import Shard
from forebay.tiers.digest import digest_fd, digest_uncached
from forebay.tiers.filesystem import temporary_beside
from forebay.tiers.landing import PARTIAL, RECORD, Fetched, FileLanding, opened_again, remove_all

log = structlog.get_logger()
T = TypeVar("T")

# What a file may take beyond its length: it is counted in blocks (S4).
_BLOCK_BYTES = 4096
_QUARANTINED = 16
_KEPT_OPEN = 256
_NOBODY = ""
# Later than the last byte of any plan.
_IN_A_PLAN = sys.float_info.max
# What says that the disk, and not just one file, is at fault.
_DISK_ERRORS = (
    errno.EIO,
    errno.EROFS,
    errno.ENODEV,
    errno.ENXIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.EUCLEAN,
)


Sizes = TypeVar("Sizes", int, npt.NDArray[np.int64])


def allocated(size_bytes: Sizes) -> Sizes:
    """What one file, or each of many, takes on a disk."""
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


class HotDisk:
    """Counts, opens, evicts. Methods run on the daemon's event loop; what may block does so in threads."""

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        settings: StagerSettings,
        catalog: Catalog,
        evictor: Evictor,
    ) -> None:
        self.folder = folder
        self.root = folder / "forebay" / "objects"
        self.name = str(folder)
        self.capacity_bytes = capacity_bytes
        self.health = Health(folder)
        self.evictor = evictor
        self._settings = settings
        self._catalog = catalog
        self._boot = boot_id()
        self._reserved: dict[str, int] = {}
        self._partial: dict[str, int] = {}
        self._opened: dict[str, int] = {}
        self._doomed: dict[str, dict[Path, int]] = {}
        self.held_bytes = catalog.totals(self.name).blocks_bytes
        self.evictions = 0
        # Something may lie here that nobody counts.
        self.untidy = False
        self._device = -1
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._device = self.root.stat().st_dev
        except OSError as err:
            self.failed(err)

    def configure(self, settings: StagerSettings, capacity_bytes: int) -> None:
        self._settings = settings
        self.capacity_bytes = capacity_bytes

    # What is there

    @property
    def reserved_bytes(self) -> int:
        """Promised to fetches, and kept for fetches that were interrupted."""
        return sum(self._reserved.values()) + sum(self._partial.values())

    def reserving(self, object_id: str) -> bool:
        return object_id in self._reserved

    def path(self, object_id: str) -> Path:
        return self.root / object_id[:2] / object_id

    def landing(self, shard: Shard, tenant: str, *, direct: bool) -> FileLanding:
        """Removes first what was evicted for it, so that the space is there before it is taken (S4)."""
        return FileLanding(self.path(shard.id), tenant, self._take_doomed(shard.id), direct=direct)

    def _take_doomed(self, reserved_for: str) -> list[Path]:
        return list(self._doomed.pop(reserved_for, {}))

    def _lingering_bytes(self) -> int:
        """Of what was evicted and is still there, more than those it was evicted for will take."""
        return sum(
            max(0, sum(doomed.values()) - self._reserved.get(reserved_for, 0))
            for reserved_for, doomed in self._doomed.items()
        )

    async def clear(self, reserved_for: str = _NOBODY) -> None:
        """Remove what was evicted, and for whom no fetch will do it."""
        if doomed := self._take_doomed(reserved_for):
            with self._left_for_the_sweep():
                await to_thread.run_sync(remove_all, doomed)

    async def open(self, held: Held) -> int | None:
        """A descriptor of a staged object, or None: a file that is gone or damaged is a miss.

        A file from another boot of the machine was perhaps never flushed: verified on first use (S3).
        """
        if (known := self._opened.get(held.id)) is not None:
            return opened_again(known)
        path = self.path(held.id)
        try:
            fd = await self._within_limit(lambda: _open_sound(path, held, self._boot))
        except OSError as err:
            self.failed(err)
            log.warning("staged file lost", object=held.id, error=str(err))
            self.forget(held)
            return None
        if fd is None:
            self.quarantine(held)
            return None
        self.health.ok()
        if held.boot_id != self._boot:
            self._catalog.verified(held, self._boot)
        self._keep_open(held.id, fd)
        return fd

    def _keep_open(self, object_id: str, fd: int) -> None:
        """What was just looked at is handed out again without looking; of the newest few."""
        self._close(object_id)
        self._opened[object_id] = os.dup(fd)
        if len(self._opened) > _KEPT_OPEN:
            self._close(next(iter(self._opened)))

    def _close(self, object_id: str) -> None:
        if (fd := self._opened.pop(object_id, None)) is not None:
            os.close(fd)

    async def _within_limit(self, call: Callable[[], T]) -> T:
        """In a thread; a disk that stays silent too long is left alone with it. Raises TimeoutError."""
        with anyio.fail_after(self._settings.stall_s):
            return await to_thread.run_sync(call, abandon_on_cancel=True)

    async def sound(self, held: Held) -> bool:
        """Every byte read and compared (scrubbing)."""
        try:
            good = await to_thread.run_sync(digest_uncached, self.path(held.id)) == held.digest
        except OSError as err:
            self.failed(err)
            return False
        if good:
            self._catalog.verified(held, self._boot)
        return good

    # Room

    def reserve(self, shard: Shard, next_use_bytes: float, tenant: str, over_quota_bytes: int) -> bool:
        """Take room for a shard, giving up others that are used later; False when that is not enough.

        Raises ShardTooLarge, and DiskFull when it is strangers' files that leave no room.
        """
        need_bytes = allocated(shard.size_bytes)
        if need_bytes > self.capacity_bytes:
            raise ShardTooLarge(
                f"{shard.name} takes {format_bytes(need_bytes)}, "
                f"the hot tier holds {format_bytes(self.capacity_bytes)} on {self.folder}",
                hint="raise stager.capacity, or write smaller shards",
            )
        kept_bytes = self._partial.pop(shard.id, 0)
        short_bytes = max(
            self.held_bytes
            + self.reserved_bytes
            + self._lingering_bytes()
            + need_bytes
            - self.capacity_bytes,
            need_bytes - kept_bytes - self._free_on_disk(),
        )
        short_bytes -= self._drop_partials(short_bytes)
        if over_quota_bytes > 0 and not self._evict_for(over_quota_bytes, next_use_bytes, tenant, shard.id):
            return False
        if short_bytes > 0 and not self._evict_for(short_bytes, next_use_bytes, None, shard.id):
            if self.held_bytes == 0 and not self._reserved:
                raise DiskFull(
                    f"{self.root} has no room for {shard.name} ({format_bytes(need_bytes)}) "
                    f"above the reserve of {format_bytes(self._settings.reserve)}"
                )
            return False
        self._reserved[shard.id] = need_bytes
        return True

    def _evict_for(
        self, need_bytes: int, next_use_bytes: float, tenant: str | None, reserved_for: str
    ) -> bool:
        chosen = self.evictor.choose(need_bytes, next_use_bytes, tenant)
        for held in chosen or ():
            self.evict(held, reserved_for)
        return chosen is not None

    def cancel(self, shard: Shard) -> None:
        """The fetch ended without a file; what it wrote so far may have stayed, and is counted."""
        self._reserved.pop(shard.id, None)
        if shard.id in self._doomed:
            with self._left_for_the_sweep():
                remove_all(self._take_doomed(shard.id))
        kept_bytes = blocks_bytes(self.path(shard.id).with_name(f"{PARTIAL}{shard.id}"))
        if kept_bytes:
            self._partial[shard.id] = kept_bytes

    def keep(self, shard: Shard, fetched: Fetched, tenant: str) -> None:
        """The reservation becomes a staged object."""
        self._reserved.pop(shard.id, None)
        now = time.time()
        held = Held(
            shard.id, self.name, tenant, fetched.size_bytes, fetched.blocks_bytes, fetched.digest,
            self._boot, now, now,
        )  # fmt: skip
        self._catalog.put(held)
        failpoint("fetch.kept")
        self.held_bytes += held.blocks_bytes
        self.evictor.came(held.id)
        self.health.ok()
        self._keep_below_water()

    def evict(self, held: Held, reserved_for: str = _NOBODY) -> None:
        """Out of sight at once; to remove a large file takes time, so the next fetch or `clear` does it."""
        aside = temporary_beside(self.path(held.id))
        with self._left_for_the_sweep():
            failpoint("evict.chosen")
            self.path(held.id).rename(aside)
            failpoint("evict.aside")
            self._doomed.setdefault(reserved_for, {})[aside] = held.blocks_bytes
        self.forget(held)
        failpoint("evict.forgotten")
        self.evictions += 1
        metrics.stager_evictions.inc()

    def forget(self, held: Held) -> None:
        self._close(held.id)
        if self._catalog.get(held.id):
            self._catalog.drop(held.id)
            self.held_bytes -= held.blocks_bytes

    def quarantine(self, held: Held) -> None:
        """Damaged bytes go where nobody opens them, for whoever wants to look; the newest few are kept."""
        log.error("staged file damaged", object=held.id, folder=str(self.folder))
        metrics.stager_damaged.inc()
        folder = self.folder / "forebay" / "quarantine"
        with self._left_for_the_sweep():
            folder.mkdir(exist_ok=True)
            self.path(held.id).rename(folder / f"{held.id}-{time.time_ns()}")
            kept = sorted(folder.iterdir(), key=lambda path: path.name.rpartition("-")[2])
            remove_all(kept[:-_QUARANTINED])
        self.forget(held)

    def _keep_below_water(self) -> None:
        """Past the high water mark, idle shards go down to the low one: nobody has to wait for it later."""
        if self.held_bytes > self._settings.high_water * self.capacity_bytes:
            while self.held_bytes > self._settings.low_water * self.capacity_bytes:
                if not self._evict_for(1, _IN_A_PLAN, None, _NOBODY):
                    return

    def _free_on_disk(self) -> int:
        try:
            if self.root.stat().st_dev != self._device:
                raise OSError(errno.ENODEV, "another file system is in its place")
            disk = os.statvfs(self.root)
        except FileNotFoundError:
            self.failed(OSError(errno.ENODEV, "the directory is gone"))
            return 0
        except OSError as err:
            self.failed(err)
            return 0
        if disk.f_files and disk.f_favail < self._settings.reserve_inodes:
            return 0
        # Reserved files are allocated as soon as their fetch begins, perhaps not yet: count them fully.
        leaving_bytes = sum(size for doomed in self._doomed.values() for size in doomed.values())
        free_bytes = disk.f_bavail * disk.f_frsize + leaving_bytes
        return free_bytes - self._settings.reserve - sum(self._reserved.values())

    def _drop_partials(self, need_bytes: int) -> int:
        freed = 0
        while self._partial and freed < need_bytes:
            object_id, kept_bytes = self._partial.popitem()
            names = (f"{PARTIAL}{object_id}", f"{PARTIAL}{object_id}{RECORD}")
            with self._left_for_the_sweep():
                remove_all([self.path(object_id).with_name(name) for name in names])
            freed += kept_bytes
        return freed

    def found_partial(self, object_id: str, kept_bytes: int) -> None:
        """A fetch of an earlier life that may go on: its space counts until somebody needs it."""
        self._partial[object_id] = kept_bytes

    def adopt(self, held: Held) -> None:
        """A staged file that the catalog had lost."""
        self._catalog.put(held)
        self.held_bytes += held.blocks_bytes
        self.evictor.came(held.id)

    # Failing and coming back

    @contextmanager
    def _left_for_the_sweep(self) -> Iterator[None]:
        """What cannot be moved or removed now is nobody's trouble but the disk's: it is swept later."""
        try:
            yield
        except OSError as err:
            self.untidy = True
            self.failed(err)

    def failed(self, err: OSError) -> None:
        """Something went wrong here; only what tells of the disk counts against it."""
        if not isinstance(err, TimeoutError) and err.errno not in _DISK_ERRORS:
            return
        metrics.stager_disk_failures.inc()
        for object_id in list(self._opened):
            self._close(object_id)
        self.health.failed(str(err) or type(err).__name__)

    async def look_after(self) -> None:
        """Probe while it is out, until it is back."""
        while not self.health.usable:
            await anyio.sleep(self.health.next_probe_s())
            self.health.probing()
            try:
                await self._within_limit(self._probe)
            except (OSError, TimeoutError) as err:
                self.health.probed(str(err) or "no answer in time")
            else:
                self.health.probed(None)

    def _probe(self) -> None:
        # Not made anew: below an empty mount point lies another disk.
        if self._device not in (-1, self.root.stat().st_dev):
            raise OSError(errno.ENODEV, "another file system is in its place")
        probe(self.root)


def _open_sound(path: Path, held: Held, boot: str) -> int | None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        sound = stat.S_ISREG(found.st_mode) and found.st_size == held.size_bytes
        if sound and held.boot_id != boot:
            sound = digest_fd(fd) == held.digest
    except BaseException:
        os.close(fd)
        raise
    if not sound:
        os.close(fd)
        return None
    return fd


def blocks_bytes(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0
