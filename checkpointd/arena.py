"""Arena: a memfd that holds one snapshot, written by the trainer, owned by whoever has the descriptor.

The first page is a header (magic, generation, size, attempt); from the second on lies the file as
it will be written. The generation is odd while the trainer copies: a half-written arena is
recognised and dropped. Space is reserved (shortage is an error, never SIGBUS, F37) and sealed
against shrinking, so that a reader's map stays valid (memfd_create(2), fcntl(2) F_ADD_SEALS).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from forebay.core.errors import CheckpointCorrupt, CheckpointError
from forebay.core.units import format_bytes

DATA_OFFSET = mmap.PAGESIZE
_HEADER = struct.Struct("<8sQQ64s")
_MAGIC = b"FOREBAY1"
_F_SEAL_SHRINK = 0x0002
_MFD_CLOEXEC_SEALING = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING


@dataclass(frozen=True)
class ArenaHeader:
    generation: int
    size_bytes: int
    attempt: str


class Arena:
    """The writer's side. Reused from save to save; grows by being replaced."""

    def __init__(self, capacity_bytes: int) -> None:
        check_memory(capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self.generation = 0
        self.fd = os.memfd_create("forebay-arena", _MFD_CLOEXEC_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, DATA_OFFSET + capacity_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_SHRINK)
            # Populated: a page touched for the first time in `save` would cost ten times its copy.
            self.map = mmap.mmap(
                self.fd, DATA_OFFSET + capacity_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
            )
        except OSError as err:
            os.close(self.fd)
            if err.errno in (errno.ENOMEM, errno.ENOSPC):
                raise _no_memory(capacity_bytes, "less") from err
            raise

    def begin(self, attempt: str, size_bytes: int) -> None:
        self.generation += 1 + self.generation % 2
        self._write(attempt, size_bytes)

    def finish(self, attempt: str, size_bytes: int) -> int:
        """The generation to hand over; even: the copy is whole."""
        self.generation += 1
        self._write(attempt, size_bytes)
        return self.generation

    def close(self) -> None:
        """The daemon's descriptor keeps the memory alive as long as it needs it."""
        os.close(self.fd)

    def _write(self, attempt: str, size_bytes: int) -> None:
        _HEADER.pack_into(self.map, 0, _MAGIC, self.generation, size_bytes, attempt.encode())


def read_header(fd: int) -> ArenaHeader:
    """The reader's side. Raises CheckpointCorrupt for anything that is not a whole snapshot."""
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise CheckpointCorrupt("the descriptor handed over is not an arena")
    _, generation, size_bytes, attempt = _HEADER.unpack(raw)
    if generation % 2 or DATA_OFFSET + size_bytes > os.fstat(fd).st_size:
        raise CheckpointCorrupt("the arena handed over is only half written")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _F_SEAL_SHRINK:
        raise CheckpointCorrupt("the arena handed over is not sealed against shrinking")
    return ArenaHeader(generation, size_bytes, attempt.rstrip(b"\0").decode())


def holds(fd: int, attempt: str, generation: int) -> bool:
    """That very snapshot, whole."""
    try:
        header = read_header(fd)
    except CheckpointCorrupt:
        return False
    return (header.attempt, header.generation) == (attempt, generation)


def check_memory(need_bytes: int) -> None:
    """Said before the first save, not by the OOM killer during it (F12). Raises CheckpointError."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            have_bytes = int(line.split()[1]) * 1024
            if need_bytes > have_bytes:
                raise _no_memory(need_bytes, format_bytes(have_bytes))


def _no_memory(need_bytes: int, have: str) -> CheckpointError:
    return CheckpointError(
        f"snapshots need {format_bytes(need_bytes)} of host memory, there is {have}",
        hint="save less state per rank (shard it), use one buffer (buffers=1), or set "
        "checkpoint.arena_bytes: what is larger is then saved in waves",
    )
