"""The spool: checkpoints on this node's NVMe, laid out as upstream.

A rank's file is written under a temporary name, flushed, renamed, and its directory flushed; then
comes its manifest, the same way. So a manifest vouches for a file that survives a power cut (C2).
"""

from __future__ import annotations

import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from forebay.checkpointd import layout
from forebay.checkpointd.arena import DATA_OFFSET, holds
from forebay.checkpointd.attempts import Attempt
from forebay.checkpointd.commit import Found
from forebay.checkpointd.layout import FileRecord, RankManifest
from forebay.core.errors import CheckpointCorrupt
from forebay.core.failpoint import failpoint
from forebay.core.protocol import About
from forebay.tiers.digest import digest_bytes
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


class Spool:
    """`root` holds run folders; the store over it makes it a tier like any other."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "runs"
        self.root.mkdir(parents=True, exist_ok=True)
        self.store = FilesystemStore(self.root)

    def folder(self, attempt: Attempt) -> Path:
        return self.root / layout.folder(attempt.run, attempt.step, attempt.attempt)

    def write(self, attempt: Attempt, arena_fd: int, generation: int, about: About) -> FileRecord:
        """Arena -> file and manifest. Runs in a thread. Raises OSError, CheckpointCorrupt."""
        folder = self.folder(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        for parent in (folder, *folder.parents):
            sync_directory(parent)
            if parent == self.root:
                break
        name = layout.rank_file(attempt.rank)
        landing = FileLanding(folder / name, direct=True, durable=True)
        try:
            landing.begin(ObjectInfo(name, attempt.size_bytes, attempt.attempt), sys.maxsize)
            digest = _drain(arena_fd, landing, attempt.size_bytes)
            if not holds(arena_fd, attempt.attempt, generation):
                raise CheckpointCorrupt("the arena was written to again before it was on disk")
            landing.publish(digest)
        finally:
            landing.close(keep=False)
        failpoint("spool.filed")
        record = FileRecord(name, attempt.size_bytes, digest)
        manifest = RankManifest(
            attempt.run, attempt.step, attempt.attempt, attempt.rank, attempt.world_size, record, about
        )
        _write_synced(folder / layout.rank_manifest(attempt.rank), layout.encode(manifest))
        failpoint("spool.manifested")
        return record

    def write_commit(self, commit: layout.Commit) -> None:
        """The same record on this tier, so that the local copy is a checkpoint of its own."""
        folder = self.root / layout.folder(commit.run, commit.step, commit.attempt)
        if folder.is_dir():
            _write_synced(folder / layout.COMMIT, layout.encode(commit))

    def path(self, run: str, step: int, attempt: str, name: str) -> Path:
        return self.root / layout.folder(run, step, attempt) / layout.check_file(name)

    def has_own(self, run: str, at: Found) -> bool:
        """Of the ranks that saved through this node every file; of what was restored here, all."""
        folder = self.root / layout.folder(run, at.step, at.attempt)
        if at.commit is None:
            return False
        own = {
            layout.rank_file(rank)
            for rank in range(at.commit.world_size)
            if (folder / layout.rank_manifest(rank)).is_file()
        }
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
        for path in sorted(folder.iterdir()):
            ours = layout.is_ours(path.name) or path.name.startswith(TEMPORARY)
            if ours and not path.is_symlink():
                path.unlink()
        for emptied in (folder, folder.parent):
            # Others' files, and other attempts of that step, keep their folders.
            if not any(emptied.iterdir()):
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


def _drain(arena_fd: int, landing: FileLanding, size_bytes: int) -> str:
    """Arena to file, digested meanwhile; the length is fixed and sealed, so the map is safe.

    The arena is page-aligned, so the disk takes it from where it is: the trainer's cached pages stay.
    """
    # Not closed by hand: after an error somebody may still look at a part of it.
    arena = mmap.mmap(arena_fd, DATA_OFFSET + size_bytes, prot=mmap.PROT_READ)
    body = memoryview(arena)[DATA_OFFSET:]
    with ThreadPoolExecutor(2, initializer=behind_the_trainer) as workers:
        digest = workers.submit(digest_bytes, body)
        workers.submit(landing.write, body, 0).result()
        return digest.result()


def behind_the_trainer() -> None:
    """This thread runs when nobody else wants the core (setpriority(2) is by thread on Linux)."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICEST)


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
