"""The spool: checkpoints on this node's NVMe, laid out as upstream.

A rank's file is written under a temporary name, flushed, renamed, and its directory flushed; then
comes its manifest, the same way. So a manifest vouches for a file that survives a power cut (C2).
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from forebay.checkpointd import layout
from forebay.checkpointd.arena import DATA_OFFSET, holds
from forebay.checkpointd.attempts import Attempt
from forebay.checkpointd.commit import Found
from forebay.checkpointd.layout import FileRecord, RankManifest
from forebay.checkpointd.sample import Sample
from forebay.core.errors import CheckpointCorrupt
from forebay.core.failpoint import failpoint
from forebay.core.protocol import About
from forebay.tiers.digest import StreamDigest, digest_fd
from forebay.tiers.filesystem import (
    OWN_TEMPORARY,
    TEMPORARY,
    FilesystemStore,
    sync_directory,
    temporary_beside,
)
from forebay.tiers.landing import FileLanding
from forebay.tiers.store import ObjectInfo

log = structlog.get_logger()

_NICEST = 19
_COPY_BYTES = 16 << 20


@dataclass(frozen=True)
class Written:
    """A rank's file on the disk: xxh3-128 of its bytes, and of some of its tensors' (None: it has none)."""

    digest: str
    sample: str | None


class Spool:
    """`root` holds run folders; the store over it makes it a tier like any other."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "runs"
        self.root.mkdir(parents=True, exist_ok=True)
        self.store = FilesystemStore(self.root)

    def folder(self, attempt: Attempt) -> Path:
        return self.root / layout.folder(attempt.run, attempt.step, attempt.attempt)

    def begin(self, attempt: Attempt) -> SnapshotFile:
        """Folders and space for a rank's file. Runs in a thread. Raises OSError."""
        folder = self.folder(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        self._sync_up({folder})
        return SnapshotFile(folder / layout.rank_file(attempt.rank), attempt)

    def write(self, attempt: Attempt, arena_fd: int, generation: int, about: About) -> Written:
        """Arena -> file and manifest. Runs in a thread. Raises OSError, CheckpointCorrupt."""
        file = self.begin(attempt)
        try:
            file.append(arena_fd, generation, attempt.size_bytes)
            return self.publish(file, about)
        finally:
            file.close()

    def publish(self, file: SnapshotFile, about: About) -> Written:
        """The file has all its bytes; returns when the manifest vouches for it."""
        written = file.publish()
        failpoint("spool.filed")
        record = FileRecord(file.name, file.attempt.size_bytes, written.digest)
        self._write_manifest(file.attempt, [record], about)
        return written

    def take(self, attempt: Attempt, root: Path, names: Sequence[str], *, copy: bool) -> None:
        """Files of a watched folder -> spool, by hard link where that is possible, and a manifest.

        `copy`: they are overwritten in place, so that a link would change with them. Raises OSError;
        CheckpointCorrupt when one changes meanwhile.
        """
        folder = self.folder(attempt)
        records = []
        for name in names:
            target = folder / layout.check_file(f"{layout.WATCHED}{name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            records.append(_take(root / name, target, f"{layout.WATCHED}{name}", copy=copy))
        self._sync_up({(folder / record.name).parent for record in records})
        self._write_manifest(attempt, records, About())

    def _sync_up(self, folders: set[Path]) -> None:
        """These folders and those above, up to the root, survive a power cut."""
        for parent in {parent for folder in folders for parent in (folder, *folder.parents)}:
            if self.root in (parent, *parent.parents):
                sync_directory(parent)

    def _write_manifest(self, attempt: Attempt, files: list[FileRecord], about: About) -> None:
        manifest = RankManifest(
            attempt.run, attempt.step, attempt.attempt, attempt.rank, attempt.world_size, files, about
        )
        name = layout.rank_manifest(attempt.rank)
        _write_synced(self.folder(attempt) / name, layout.encode(manifest))
        failpoint("spool.manifested")

    def write_commit(self, commit: layout.Commit) -> None:
        """The same record on this tier, so that the local copy is a checkpoint of its own.

        Written once: without an upstream it is here already, and another rank may be reading it.
        """
        folder = self.root / layout.folder(commit.run, commit.step, commit.attempt)
        path, record = folder / layout.COMMIT, layout.encode(commit)
        if folder.is_dir() and not (path.is_file() and path.read_bytes() == record):
            _write_synced(path, record)

    def path(self, run: str, step: int, attempt: str, name: str) -> Path:
        return self.root / layout.folder(run, step, attempt) / layout.check_file(name)

    def has_own(self, run: str, at: Found) -> bool:
        """Of the ranks that saved through this node every file; of what was restored here, all."""
        folder = self.root / layout.folder(run, at.step, at.attempt)
        if at.commit is None:
            return False
        own = _listed(folder)
        return own <= at.there if own else at.problem is None

    def remove(self, run: str, step: int, attempt: str) -> bool:
        """COMMIT first: a half-removed checkpoint must not look like one. Only names of ours go.

        False when it was not there.
        """
        folder = self.root / layout.folder(run, step, attempt)
        if not folder.is_dir():
            return False
        (folder / layout.COMMIT).unlink(missing_ok=True)
        failpoint("retention.uncommitted")
        listed = {folder / name for name in _listed(folder)}
        for path in sorted(folder.iterdir()):
            ours = layout.is_ours(path.name) or path.name.startswith(TEMPORARY)
            if ours and not path.is_symlink():
                path.unlink()
        for path in listed:
            path.unlink(missing_ok=True)
        parents = {parent for path in listed for parent in path.parents if folder in parent.parents}
        for emptied in (*sorted(parents, key=lambda path: -len(path.parts)), folder, folder.parent):
            # Others' files, and other attempts of that step, keep their folders.
            if emptied.is_dir() and not any(emptied.iterdir()):
                emptied.rmdir()
        return True

    def quarantine(self, path: Path) -> None:
        """A damaged file leaves its name, and stays for whoever wants to look."""
        log.warning("damaged file put aside", path=str(path))
        path.rename(path.with_name(f"{path.name}.damaged"))

    def sweep(self) -> None:
        """Temporaries of a dead daemon."""
        for path in self.root.glob(f"*/*/*/{TEMPORARY}*"):
            if not path.name.startswith(OWN_TEMPORARY):
                path.unlink(missing_ok=True)


class SnapshotFile:
    """A rank's file on its way from arenas to the disk: whole under its name, or not there."""

    def __init__(self, path: Path, attempt: Attempt) -> None:
        self.name = path.name
        self.attempt = attempt
        self._digest = StreamDigest()
        self._sample = Sample(attempt.size_bytes)
        self._landing = FileLanding(path, direct=True, durable=True)
        try:
            self._landing.begin(ObjectInfo(path.name, attempt.size_bytes, attempt.attempt), sys.maxsize)
        except OSError:
            self.close()
            raise

    @property
    def written_bytes(self) -> int:
        return self._digest.size_bytes

    def append(self, arena_fd: int, generation: int, size_bytes: int) -> None:
        """What the arena holds, digested meanwhile; its length is fixed and sealed, so the map is safe.

        The arena is page-aligned, so the disk takes it from where it is: the trainer's cached pages stay.
        """
        # Not closed by hand: after an error somebody may still look at a part of it.
        arena = mmap.mmap(arena_fd, DATA_OFFSET + size_bytes, prot=mmap.PROT_READ)
        body = memoryview(arena)[DATA_OFFSET:]
        offset = self.written_bytes
        with ThreadPoolExecutor(2, initializer=behind_the_trainer) as workers:
            digested = workers.submit(self._digest.update, body)
            workers.submit(self._landing.write, body, offset).result()
            digested.result()
        self._sample.update(body)
        if not holds(arena_fd, self.attempt.attempt, generation):
            raise CheckpointCorrupt("the arena was written to again before it was on disk")

    def publish(self) -> Written:
        self._landing.publish(self._digest.xxh3)
        return Written(self._digest.xxh3, self._sample.xxh3)

    def close(self) -> None:
        self._landing.close(keep=False)


def _listed(folder: Path) -> set[str]:
    """The files that the manifests of an attempt's folder name."""
    names: set[str] = set()
    for path in folder.glob("rank-*.manifest.json"):
        with suppress(CheckpointCorrupt):
            names |= {file.name for file in layout.read_manifest(path).files}
    return names


def behind_the_trainer() -> None:
    """This thread runs when nobody else wants the core (setpriority(2) is by thread on Linux)."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICEST)


def _take(source: Path, target: Path, name: str, *, copy: bool) -> FileRecord:
    """The source's bytes at one moment, on the disk, under a name of their own. Links are not followed."""
    before = _moment(source)
    target.unlink(missing_ok=True)
    if copy or not _linked(source, target):
        taken = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(taken, "rb") as from_, target.open("xb") as to:
            shutil.copyfileobj(from_, to, _COPY_BYTES)
    with open(os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        digest = digest_fd(file.fileno())
        os.fsync(file.fileno())
        size_bytes = os.fstat(file.fileno()).st_size
    if _moment(source) != before:
        target.unlink()
        raise CheckpointCorrupt(f"{source} was written to while it was taken")
    return FileRecord(name, size_bytes, digest)


def _moment(path: Path) -> tuple[int, int, int]:
    """Another one means other bytes. A link that is made changes none of it."""
    found = path.lstat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as err:
        if err.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        return False
    return True


def _write_synced(path: Path, data: bytes) -> None:
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
