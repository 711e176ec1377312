"""Limits and clocks of the host."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator

from forebay.api.doctor.finding import Finding, Node
from forebay.core.units import format_bytes

_FILES = 65_536
_WATCHES = 65_536
_SHM_BYTES = 1 << 30
_STA_UNSYNC = 0x0040
_ADJTIMEX_BYTES = 256
_STATUS_AT = 40


def check_limits(node: Node) -> Iterator[Finding]:
    """Of this process: a daemon under systemd has the limits of its unit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FILES:
        yield Finding(
            "limits",
            "warn",
            f"open files are limited to {hard}",
            "each open shard is a descriptor in every rank",
            f"ulimit -Hn {_FILES}, or LimitNOFILE={_FILES} in the unit",
        )
    else:
        yield Finding("limits", "ok", f"open files: {soft}, at most {_told(hard)}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < 1 << 30:
        yield Finding(
            "limits",
            "note",
            f"locked memory is limited to {format_bytes(locked)}",
            "InfiniBand and page-locked batches lock memory",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity",
        )
    else:
        yield Finding(
            "limits", "ok", "locked memory is not limited" if locked < 0 else f"locked memory: {locked}"
        )


def _told(limit: int) -> str:
    return "without limit" if limit == resource.RLIM_INFINITY else str(limit)


def check_memory(node: Node) -> Iterator[Finding]:
    shm = node.root / "dev/shm"
    if shm.is_dir():
        stat = os.statvfs(shm)
        size_bytes = stat.f_blocks * stat.f_frsize
        if size_bytes < _SHM_BYTES:
            yield Finding(
                "shm",
                "warn",
                f"/dev/shm holds {format_bytes(size_bytes)}",
                "NCCL and torch's own loader workers pass data through it; Forebay's do not",
                "docker run --shm-size=8g, or an emptyDir of medium Memory at /dev/shm",
            )
        else:
            yield Finding("shm", "ok", f"/dev/shm holds {format_bytes(size_bytes)}")
    huge = node.text("sys/kernel/mm/transparent_hugepage/enabled") or ""
    if "[never]" in huge:
        yield Finding(
            "memory",
            "note",
            "transparent huge pages are off",
            "large batches and snapshots cost more page faults",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    elif huge:
        yield Finding("memory", "ok", f"transparent huge pages: {huge}")
    watches = node.number("proc/sys/fs/inotify/max_user_watches")
    if node.settings.dropbox and watches is not None and watches < _WATCHES:
        yield Finding(
            "inotify",
            "warn",
            f"inotify watches are limited to {watches}",
            "watched folders need one per directory",
            f"sysctl fs.inotify.max_user_watches={_WATCHES * 8}",
        )


def check_clock(node: Node) -> Iterator[Finding]:
    """Whether the kernel says that something keeps the clock right (adjtimex(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_ADJTIMEX_BYTES)
    state = libc.adjtimex(buffer)
    status = ctypes.c_int.from_buffer(buffer, _STATUS_AT).value
    if state < 0:
        yield Finding("clock", "note", "the kernel does not tell whether the clock is kept right")
    elif status & _STA_UNSYNC:
        yield Finding(
            "clock",
            "warn",
            "nothing keeps the clock of this node right",
            "object stores refuse signatures that are 15 minutes off; logs of nodes cannot be compared",
            "start chronyd or systemd-timesyncd",
        )
    else:
        yield Finding("clock", "ok", "the clock is kept right")
