"""Names and records of a checkpoint, the same on every tier.

    <run>/step-000000100/<attempt>/rank-00000.safetensors
                                   rank-00000.manifest.json
                                   COMMIT.json               written last
                                   PIN.json                  retention leaves it alone

What a watched folder held lies below `files/`, under the names it had there.

A name from outside (a message, a manifest) is checked here before it becomes a path (C8).
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from forebay.core.errors import CheckpointCorrupt, InvalidRequest
from forebay.core.protocol import About
from forebay.tiers.store import check_key

COMMIT = "COMMIT.json"
PIN = "PIN.json"
WATCHED = "files/"
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ATTEMPT = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_FILE = re.compile(r"rank-(?P<rank>\d{5})\.safetensors")
_OURS = re.compile(r"rank-\d{5}\.(safetensors|manifest\.json)(\.damaged|\.upload)?")
_OUR_KEY = re.compile(r"[^/]+/step-\d{9,}/[^/]+/(rank-\d{5}\.safetensors|files/.+)")
_MANIFEST_KEY = re.compile(r"[^/]+/step-(?P<step>\d{9,})/(?P<attempt>[^/]+)/rank-\d{5}\.manifest\.json")
_COMMIT_KEY = re.compile(r"(?:(?P<run>[^/]+)/)?step-(?P<step>\d{9,})/(?P<attempt>[^/]+)/COMMIT\.json")


class FileRecord(msgspec.Struct, frozen=True):
    """One file: `digest` is xxh3-128 of its bytes."""

    name: str
    size_bytes: int
    digest: str


class RankManifest(msgspec.Struct, frozen=True):
    """Written beside a rank's file when that is whole on this tier."""

    run: str
    step: int
    attempt: str
    rank: int
    world_size: int
    files: list[FileRecord]
    about: About = About()


class Commit(msgspec.Struct, frozen=True):
    """The checkpoint is complete. Nothing else makes it so."""

    run: str
    step: int
    attempt: str
    world_size: int
    files: list[FileRecord]
    committed_at: float
    about: About = About()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def check_run(run: str) -> str:
    if not _RUN.fullmatch(run):
        raise InvalidRequest(f"{run!r} is no name for a run", hint="letters, digits, `.`, `_`, `-`")
    return run


def check_attempt(attempt: str) -> str:
    if not _ATTEMPT.fullmatch(attempt):
        raise InvalidRequest(f"{attempt!r} is no attempt id")
    return attempt


def check_file(name: str) -> str:
    if not _FILE.fullmatch(name):
        if not name.startswith(WATCHED):
            raise InvalidRequest(f"{name!r} is no file of a checkpoint")
        check_key(name)
    return name


def rank_of(name: str) -> int | None:
    """None for a file of a watched folder."""
    found = _FILE.fullmatch(name)
    return int(found["rank"]) if found else None


def is_ours(name: str) -> bool:
    """Of the files in an attempt's folder, what Forebay may remove."""
    return bool(_OURS.fullmatch(name))


def is_our_key(key: str) -> bool:
    """An object that a checkpoint consists of."""
    return bool(_OUR_KEY.fullmatch(key))


def folder(run: str, step: int, attempt: str) -> str:
    if step < 0:
        raise InvalidRequest(f"step {step} is negative")
    return f"{check_run(run)}/step-{step:09d}/{check_attempt(attempt)}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def rank_manifest(rank: int) -> str:
    return f"rank-{rank:05d}.manifest.json"


def parse_commit_key(key: str) -> tuple[int, str] | None:
    """(step, attempt) of a COMMIT.json's key, None for other keys. Steps compare as numbers (F38)."""
    found = _COMMIT_KEY.fullmatch(key)
    return (int(found["step"]), found["attempt"]) if found else None


def read_commit(data: bytes, where: str, run: str, step: int, attempt: str) -> Commit:
    """Raises CheckpointCorrupt when it is not the record that its place says it is."""
    try:
        commit = msgspec.json.decode(data, type=Commit)
    except msgspec.MsgspecError as err:
        raise CheckpointCorrupt(f"{where} cannot be read: {err}") from err
    names = [file.name for file in commit.files]
    if (commit.run, commit.step, commit.attempt) != (run, step, attempt):
        raise CheckpointCorrupt(f"{where} belongs to {commit.run} step {commit.step} {commit.attempt}")
    try:
        watched = bool(names) and all(check_file(name).startswith(WATCHED) for name in names)
    except InvalidRequest as err:
        raise CheckpointCorrupt(f"{where}: {err.message}") from err
    if not watched and names != [rank_file(rank) for rank in range(commit.world_size)]:
        raise CheckpointCorrupt(f"{where} lists {len(names)} files for {commit.world_size} ranks")
    return commit


def read_manifest(path: Path) -> RankManifest:
    """A rank's own, from the spool. Raises CheckpointCorrupt."""
    try:
        return decode_manifest(path.read_bytes(), str(path))
    except OSError as err:
        raise CheckpointCorrupt(f"{path} cannot be read: {err}") from err


def decode_manifest(data: bytes, where: str) -> RankManifest:
    """Raises CheckpointCorrupt."""
    try:
        return msgspec.json.decode(data, type=RankManifest)
    except msgspec.MsgspecError as err:
        raise CheckpointCorrupt(f"{where} cannot be read: {err}") from err


def parse_manifest_key(key: str) -> tuple[int, str] | None:
    """(step, attempt) of a rank manifest's key, None for other keys."""
    found = _MANIFEST_KEY.fullmatch(key)
    return (int(found["step"]), found["attempt"]) if found else None


def encode(record: RankManifest | Commit) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
