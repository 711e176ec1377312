"""The spool: checkpoints on this node's NVMe, laid out as upstream.

A rank's file is written under a temporary name, flushed, renamed, and its directory flushed; then
comes its manifest, the same way. So a manifest vouches for a file that survives a power cut (C2).
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import structlog

from forebay.checkpointd import layout
from forebay.checkpointd.arena import DATA_OFFSET, read_header
from forebay.checkpointd.attempts import Attempt
from forebay.checkpointd.layout import FileRecord, RankManifest
from forebay.core.errors import CheckpointCorrupt
from forebay.tiers.digest import StreamDigest
from forebay.tiers.filesystem import (
    OWN_TEMPORARY,
    TEMPORARY,
    FilesystemStore,
    sync_directory,
    temporary_beside,
)

log = structlog.get_logger()

_STEP_BYTES = 16 << 20


class Spool:
    """`root` holds run folders; the store over it makes it a tier like any other."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "runs"
        self.root.mkdir(parents=True, exist_ok=True)
        self.store = FilesystemStore(self.root)

    def folder(self, attempt: Attempt) -> Path:
        return self.root / layout.folder(attempt.run, attempt.step, attempt.attempt)

    def write(self, attempt: Attempt, arena_fd: int, generation: int) -> FileRecord:
        """Arena -> file and manifest. Runs in a thread. Raises OSError, CheckpointCorrupt."""
        folder = self.folder(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        for parent in (folder, *folder.parents):
            sync_directory(parent)
            if parent == self.root:
                break
        name = layout.rank_file(attempt.rank)
        temporary = temporary_beside(folder / name)
        try:
            with temporary.open("xb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, attempt.size_bytes)
                digest = _copy(arena_fd, file.fileno(), attempt.size_bytes)
                os.fsync(file.fileno())
            header = read_header(arena_fd)
            if (header.generation, header.attempt) != (generation, attempt.attempt):
                raise CheckpointCorrupt("the arena was written to again before it was on disk")
            temporary.rename(folder / name)
        finally:
            temporary.unlink(missing_ok=True)
        record = FileRecord(name, attempt.size_bytes, digest)
        manifest = RankManifest(
            attempt.run, attempt.step, attempt.attempt, attempt.rank, attempt.world_size, record
        )
        _write_synced(folder / layout.rank_manifest(attempt.rank), layout.encode(manifest))
        return record

    def write_commit(self, commit: layout.Commit) -> None:
        """The same record on this tier, so that the local copy is a checkpoint of its own."""
        folder = self.root / layout.folder(commit.run, commit.step, commit.attempt)
        if folder.is_dir():
            _write_synced(folder / layout.COMMIT, layout.encode(commit))

    def remove(self, run: str, step: int, attempt: str) -> bool:
        """COMMIT first: a half-removed checkpoint must not look like one. Only names of ours go.

        False when it was not there.
        """
        folder = self.root / layout.folder(run, step, attempt)
        if not folder.is_dir():
            return False
        (folder / layout.COMMIT).unlink(missing_ok=True)
        for path in sorted(folder.iterdir()):
            if _OURS.fullmatch(path.name) and not path.is_symlink():
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


_OURS = re.compile(rf"(rank-\d{{5}}\.(safetensors|manifest\.json)(\.damaged)?|{re.escape(TEMPORARY)}.*)")


def _copy(source: int, target: int, size_bytes: int) -> str:
    """Arena to file, digested on the way; the length is fixed and sealed, so the map is safe."""
    digest = StreamDigest()
    with (
        mmap.mmap(source, DATA_OFFSET + size_bytes, prot=mmap.PROT_READ) as arena,
        memoryview(arena) as view,
    ):
        for start in range(0, size_bytes, _STEP_BYTES):
            with view[DATA_OFFSET + start : DATA_OFFSET + min(start + _STEP_BYTES, size_bytes)] as part:
                digest.update(part)
                done = 0
                while done < len(part):
                    done += os.pwrite(target, part[done:], start + done)
    return digest.xxh3


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
