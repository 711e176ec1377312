"""Where a transfer's bytes land: a file that appears by rename, or memory when no disk will do.

A large file that is interrupted can go on where it was: beside it lies a record of the ranges that
are written. The record holds the boot of the machine, since after a power cut nobody knows which of
the pages behind it reached the disk.
"""

from __future__ import annotations

import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.core.failpoint import failpoint
from forebay.core.service import boot_id
from forebay.tiers.filesystem import sync_directory, temporary_beside
from forebay.tiers.store import ObjectInfo

try:
    from forebay.tiers._native import write_steps
except ImportError:
    write_steps = None

PARTIAL = ".forebay-part-"
RECORD = ".ranges"
# Extended attribute (xattr(7)) by which a staged file says what it is when the catalog is lost.
XATTR = "user.forebay"
_WRITE_BYTES = 64 << 10
# What is not read soon goes past the page cache (open(2), O_DIRECT), where a write is large enough to
# fill the disk's queue: a third of the CPU, and a trainer's cached pages stay.
_DIRECT_BYTES = 1 << 20
_ALIGN_BYTES = 4096


class Note(msgspec.Struct, frozen=True):
    """What a staged file says of itself."""

    size_bytes: int
    digest: str
    tenant: str = ""


@dataclass(frozen=True)
class Fetched:
    """Bytes that are whole and verified. `blocks_bytes` is what the disk gave for them."""

    size_bytes: int
    blocks_bytes: int
    digest: str
    path: Path | None = None
    fd: int | None = None


class Landing(ABC):
    """One object's bytes. `fd` is open from `begin` to `close`; all methods may block."""

    fd: int = -1

    @abstractmethod
    def begin(self, info: ObjectInfo, range_bytes: int) -> list[int]:
        """Take the space; the numbers of the ranges that are there already."""

    def write(self, body: memoryview, offset: int) -> None:
        """One call at a time: the kernel lets writers of one file spin for each other.

        In steps: one large write makes the kernel look for large free pages, which are cold ones.
        """
        if write_steps is not None:
            write_steps(self.fd, body, offset, _WRITE_BYTES, 0)
            return
        while body:
            done = os.pwrite(self.fd, body[:_WRITE_BYTES], offset)
            body, offset = body[done:], offset + done

    @abstractmethod
    def arrived(self, number: int) -> None:
        """A range is written."""

    @abstractmethod
    def publish(self, digest: str) -> Fetched:
        """Whole and verified: make it visible."""

    def close(self, *, keep: bool) -> None:
        """Give back what was not published; with `keep` a later try may go on from it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class FileLanding(Landing):
    """A file that has its final name only when it is whole."""

    def __init__(
        self,
        final: Path,
        tenant: str = "",
        clear: Sequence[Path] = (),
        *,
        direct: bool = False,
        durable: bool = False,
    ) -> None:
        """`clear` are files whose space this one is to have: removed first, where that may block.

        `direct`: nobody reads it soon, so it need not go through the page cache. `durable`: once published
        it survives a power cut (fsync of the file, then of its directory).
        """
        self.final = final
        self._clear = clear
        self._direct = direct
        self._durable = durable
        self._direct_fd = -1
        self._tenant = tenant
        self._temporary = temporary_beside(final)
        self._record: _Record | None = None

    def begin(self, info: ObjectInfo, range_bytes: int) -> list[int]:
        """Space is taken now, so that a full disk is an error before the transfer, not in it."""
        remove_all(self._clear)
        self._clear = ()
        self._size_bytes = info.size_bytes
        self.final.parent.mkdir(parents=True, exist_ok=True)
        if info.size_bytes > range_bytes:
            self._temporary = self.final.with_name(f"{PARTIAL}{self.final.name}")
            self._record = _Record(self._temporary, info, range_bytes)
            done = self._record.done if self._temporary.is_file() else []
            if not done:
                self._temporary.unlink(missing_ok=True)
            self.fd = os.open(self._temporary, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        else:
            done = []
            self.fd = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        if info.size_bytes:
            os.posix_fallocate(self.fd, 0, info.size_bytes)
        if self._record:
            self._record.begin(done)
        if self._direct and write_steps is not None and info.size_bytes >= _DIRECT_BYTES:
            # Some file systems refuse (tmpfs): then as ever.
            with suppress(OSError):
                flags = os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._direct_fd = os.open(self._temporary, flags)
        failpoint("landing.begun")
        return done

    def write(self, body: memoryview, offset: int) -> None:
        """Of what goes past the page cache, the last part of a block cannot."""
        if self._direct_fd >= 0 and offset % _ALIGN_BYTES == 0:
            whole = len(body) - len(body) % _ALIGN_BYTES
            write_steps(self._direct_fd, body[:whole], offset, _DIRECT_BYTES, _ALIGN_BYTES)
            body, offset = body[whole:], offset + whole
        super().write(body, offset)
        failpoint("landing.written")

    def arrived(self, number: int) -> None:
        if self._record:
            self._record.add(number)
            failpoint("landing.recorded")

    def publish(self, digest: str) -> Fetched:
        failpoint("landing.verified")
        stat = os.fstat(self.fd)
        note = Note(self._size_bytes, digest, self._tenant)
        # On a file system without extended attributes a file does not outlive its catalog.
        with suppress(OSError):
            os.setxattr(self.fd, XATTR, msgspec.msgpack.encode(note))
        failpoint("landing.noted")
        if self._durable:
            os.fsync(self.fd)
        self._temporary.rename(self.final)
        failpoint("landing.renamed")
        if self._durable:
            sync_directory(self.final.parent)
        return Fetched(self._size_bytes, stat.st_blocks * 512, digest, path=self.final)

    def close(self, *, keep: bool) -> None:
        super().close(keep=keep)
        if self._direct_fd >= 0:
            os.close(self._direct_fd)
            self._direct_fd = -1
        if not (keep and self._record):
            self._temporary.unlink(missing_ok=True)
            if self._record:
                self._record.remove()
        if self._record:
            self._record.close()


def opened_again(fd: int) -> int:
    """For reading, with an offset of its own, which a duplicate would share with all who have it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def remove_all(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


class MemoryLanding(Landing):
    """A sealed memfd (memfd_create(2)): for a shard that no disk can take."""

    def begin(self, info: ObjectInfo, range_bytes: int) -> list[int]:
        self._size_bytes = info.size_bytes
        self.fd = os.memfd_create("forebay-shard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        if info.size_bytes:
            os.posix_fallocate(self.fd, 0, info.size_bytes)
        return []

    def arrived(self, number: int) -> None:
        """Nobody goes on from memory that is gone."""

    def publish(self, digest: str) -> Fetched:
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        return Fetched(self._size_bytes, 0, digest, fd=os.dup(self.fd))


class _Header(msgspec.Struct, frozen=True):
    """Which bytes a partial file holds: of another version or layout, none of them count."""

    key: str
    version: str
    size_bytes: int
    range_bytes: int
    boot_id: str


class _Record:
    """`<partial>.ranges`: a line of header, then a line for each range that is written."""

    def __init__(self, partial: Path, info: ObjectInfo, range_bytes: int) -> None:
        self._path = partial.with_name(f"{partial.name}{RECORD}")
        self._header = _Header(info.key, info.version, info.size_bytes, range_bytes, boot_id())
        self._file = -1
        self.done = self._read()

    def _read(self) -> list[int]:
        try:
            lines = self._path.read_bytes().split(b"\n")
            if msgspec.json.decode(lines[0], type=_Header) != self._header:
                return []
            # The last line may be cut off: it has no end, so it is not one of these.
            ranges = -(-self._header.size_bytes // self._header.range_bytes)
            return sorted({n for n in map(int, lines[1:-1]) if 0 <= n < ranges})
        except (OSError, ValueError):
            return []

    def begin(self, done: list[int]) -> None:
        """Written anew, so that a line that was cut off is gone."""
        flags = os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o644)
        lines = [msgspec.json.encode(self._header), *(str(number).encode() for number in done)]
        os.write(self._file, b"\n".join(lines) + b"\n")

    def add(self, number: int) -> None:
        os.write(self._file, f"{number}\n".encode())

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
