"""The hot tier's disks and the spool's: file system, mount options, room, raw speed."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from forebay.api.doctor.finding import Finding, Node
from forebay.core.units import format_bytes

_LOCAL = ("ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs")
_SHARED = (
    "nfs",
    "nfs4",
    "ceph",
    "lustre",
    "beegfs",
    "cifs",
    "smb3",
    "gpfs",
    "glusterfs",
    "fuse.sshfs",
    "9p",
    "virtiofs",
)
_IN_MEMORY = ("tmpfs", "ramfs")
_PIECE_BYTES = 8 << 20
_PROBE_BYTES = 256 << 20
_PROBE_S = 5.0


class Mount(msgspec.Struct, frozen=True):
    place: str
    kind: str
    options: frozenset[str]


def check_disks(node: Node) -> Iterator[Finding]:
    folders = [(folder, "hot tier") for folder in node.settings.hot_dirs]
    folders.append((node.settings.spool_dir, "spool"))
    need_bps = node.need_bps / max(1, len(node.settings.hot_dirs))
    for folder, what in folders:
        there = _nearest(folder)
        if not os.access(there, os.W_OK):
            yield Finding(
                "disk",
                "fail",
                f"the {what} {folder} cannot be written to",
                "nothing can be staged or saved there",
                "chown it to the daemons' user, or set another folder",
            )
            continue
        yield from _file_system(node, there, folder, what)
        yield from _room(node, there, folder, what)
        if not node.quick:
            yield from _speed(there, folder, what, need_bps if what == "hot tier" else 0.0)


def mount_of(mountinfo: str, path: Path) -> Mount | None:
    """The mount that holds the path (proc_pid_mountinfo(5)); the last one wins where several lie on top."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        place, options = fields.split()[4:6]
        kind, _, more = rest.split(maxsplit=2)
        place = place.encode().decode("unicode_escape")
        if path.is_relative_to(place) and (best is None or len(place) >= len(best.place)):
            best = Mount(place, kind, frozenset(f"{options},{more}".split(",")))
    return best


def _nearest(folder: Path) -> Path:
    """The folder, or what of its path there is."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _file_system(node: Node, there: Path, folder: Path, what: str) -> Iterator[Finding]:
    mount = mount_of(node.text("proc/self/mountinfo") or "", there.resolve())
    if mount is None:
        return
    name = f"the {what} {folder} is on {mount.kind}"
    if mount.kind in _IN_MEMORY:
        yield Finding(
            "disk",
            "warn",
            name,
            "it takes memory from the trainers, and a restart of the node empties it",
            "use a directory on local NVMe",
        )
    elif mount.kind in _SHARED:
        yield Finding(
            "disk",
            "fail",
            name,
            "its speed and its locks are not this node's; every node would share one disk",
            "use local NVMe here, and name the shared file system as warm.url",
        )
    elif mount.kind == "overlay":
        yield Finding(
            "disk",
            "warn",
            name,
            "a container's own layer is slow and goes with the container",
            "mount a host directory on NVMe there",
        )
    elif mount.kind not in _LOCAL:
        yield Finding("disk", "note", f"{name}, which Forebay was not tried on")
    else:
        yield Finding("disk", "ok", name)
    for option, why in (
        ("sync", "each write waits for the disk"),
        ("data=journal", "everything is written twice"),
        ("strictatime", "each read writes"),
        ("nobarrier", "a power cut can lose what was said to be durable"),
    ):
        if option in mount.options:
            yield Finding(
                "mount",
                "warn",
                f"{mount.place} is mounted with {option}",
                why,
                f"remount it without {option}",
            )
    if "discard" in mount.options and mount.kind in ("ext4", "xfs"):
        yield Finding(
            "mount",
            "note",
            f"{mount.place} is mounted with discard",
            "each eviction waits for the trim",
            "use fstrim.timer in its place",
        )
    if _rotational(node, there):
        yield Finding(
            "disk",
            "warn",
            f"the {what} {folder} is on a spinning disk",
            "ranks read many shards at once",
            "use NVMe or another SSD",
        )


def _rotational(node: Node, there: Path) -> bool:
    device = there.stat().st_dev
    block = node.root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    if "virtio" in str(block.resolve()):
        # A virtual disk says that it spins, whatever it lies on.
        return False
    for place in ("queue/rotational", "../queue/rotational"):
        found = node.number(f"sys/dev/block/{os.major(device)}:{os.minor(device)}/{place}")
        if found is not None:
            return found == 1
    return False


def _room(node: Node, there: Path, folder: Path, what: str) -> Iterator[Finding]:
    stat = os.statvfs(there)
    free_bytes, total_bytes = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    if stat.f_files and stat.f_favail < node.settings.stager.reserve_inodes:
        yield Finding(
            "room",
            "fail",
            f"{folder} has {stat.f_favail} inodes free",
            "nothing more can be created there",
            "remove files, or make the file system with more inodes",
        )
    if what == "hot tier":
        wanted = node.settings.stager.capacity // len(node.settings.hot_dirs)
        held = _held_bytes(folder)
        if free_bytes + held < wanted:
            yield Finding(
                "room",
                "warn",
                f"{folder}: {format_bytes(free_bytes + held)} can be had, stager.capacity asks "
                f"{format_bytes(wanted)} of this disk",
                "shards are evicted before the capacity is reached",
                "free room, or lower stager.capacity so that quotas and plans fit what there is",
            )
            return
    elif free_bytes < max(1 << 30, total_bytes // 20):
        yield Finding(
            "room",
            "warn",
            f"{folder}: {format_bytes(free_bytes)} free",
            "a save waits when the spool is full",
            "free room, or set checkpoint.spool_dir to a larger disk",
        )
        return
    yield Finding("room", "ok", f"{folder}: {format_bytes(free_bytes)} free")


def _held_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_blocks * 512
    return total


def _speed(there: Path, folder: Path, what: str, need_bps: float) -> Iterator[Finding]:
    try:
        write_bps, read_bps = probe(there)
    except OSError as err:
        yield Finding("speed", "warn", f"{folder}: its speed cannot be measured: {err.strerror}")
        return
    written, read = format_bytes(int(write_bps)), format_bytes(int(read_bps))
    rates = f"{folder}: writes {written}/s, reads {read}/s past the page cache"
    if need_bps and min(write_bps, read_bps) < need_bps:
        yield Finding(
            "speed",
            "fail",
            f"{rates}; {format_bytes(int(need_bps))}/s are needed of it",
            "ranks would wait for this disk: each byte is written once and read at least once",
            "add disks to stager.hot_dir, or ask less with smaller samples or more nodes",
        )
    else:
        yield Finding("speed", "ok", rates)


def probe(there: Path) -> tuple[float, float]:
    """Bytes per second, written and read in large pieces with O_DIRECT; a few seconds at most."""
    path = there / f".forebay-doctor-{os.getpid()}"
    piece = mmap.mmap(-1, _PIECE_BYTES)
    piece.write(os.urandom(1 << 20) * (_PIECE_BYTES >> 20))
    room = os.statvfs(there)
    size_bytes = min(_PROBE_BYTES, room.f_bavail * room.f_frsize // 4) // _PIECE_BYTES * _PIECE_BYTES
    if not size_bytes:
        raise OSError(28, "no room for a probe")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            # Not every file system knows O_DIRECT; fsync and DONTNEED come near it.
            path.unlink(missing_ok=True)
            fd = os.open(path, flags, 0o600)
        try:
            written, write_s = _move(lambda at: os.pwritev(fd, [piece], at), size_bytes)
            began_at = time.monotonic()
            os.fsync(fd)
            write_s += time.monotonic() - began_at
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read, read_s = _move(lambda at: os.preadv(fd, [piece], at), written)
        finally:
            os.close(fd)
    finally:
        path.unlink(missing_ok=True)
        piece.close()
    return written / write_s, read / read_s


def _move(one: Callable[[int], int], size_bytes: int) -> tuple[int, float]:
    began_at, moved = time.monotonic(), 0
    while moved < size_bytes and time.monotonic() - began_at < _PROBE_S:
        moved += one(moved)
    return moved, max(1e-9, time.monotonic() - began_at)
