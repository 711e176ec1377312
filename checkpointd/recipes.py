"""What other tools write into a folder, and when it is complete: one small class per tool.

Sources: transformers.Trainer (`checkpoint-500/`, trainer_state.json), Lightning's ModelCheckpoint
(`epoch=1-step=500.ckpt`), Megatron-LM (`iter_0000500/`, latest_checkpointed_iteration.txt),
torch.distributed.checkpoint (`.metadata`, written last), and single files that are overwritten.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

_STEP_IN_NAME = re.compile(r"step[=_-]?(\d+)")
_LAST_NUMBER = re.compile(r"(\d+)\D*$")
# What tools write beside, and rename when it is whole.
_TEMPORARY = re.compile(r"(^\.|^tmp|~$|\.tmp|\.part$)")
_NOT_FOR_A_RUN = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Candidate:
    """Something in the folder that may be a checkpoint. `names` are relative to `root`.

    `series` tells apart what has no step of its own: each such file is a run for itself. `changed_at`
    is when its newest file was written; `signature` names these very files.
    """

    step: int
    root: Path
    names: tuple[str, ...]
    changed_at: float
    signature: str
    series: str = ""
    in_place: bool = False


class Recipe(ABC):
    """Raises OSError where the folder cannot be read; what goes away meanwhile is left out."""

    @abstractmethod
    def find(self, folder: Path) -> Iterator[Candidate]:
        """Everything that has the shape of a checkpoint."""

    @abstractmethod
    def complete(self, candidate: Candidate) -> bool:
        """The tool has written all of it, by its own marks; that it lies still is looked at besides."""


class HuggingFace(Recipe):
    """The state of the trainer is written after model, optimizer and random states."""

    def find(self, folder: Path) -> Iterator[Candidate]:
        yield from _folders(folder, re.compile(r"checkpoint-(\d+)"))

    def complete(self, candidate: Candidate) -> bool:
        try:
            json.loads((candidate.root / "trainer_state.json").read_bytes())
        except (OSError, ValueError):
            return False
        return True


class Lightning(Recipe):
    """One file, a zip archive whose directory comes last."""

    def find(self, folder: Path) -> Iterator[Candidate]:
        for path in _children(folder):
            if path.name.endswith(".ckpt") and not _TEMPORARY.search(path.name):
                yield from _single(path, in_place=False)

    def complete(self, candidate: Candidate) -> bool:
        return zipfile.is_zipfile(candidate.root / candidate.names[0])


class Megatron(Recipe):
    """The tracker file names the last iteration of which all ranks are done."""

    def find(self, folder: Path) -> Iterator[Candidate]:
        yield from _folders(folder, re.compile(r"iter_(\d+)"))

    def complete(self, candidate: Candidate) -> bool:
        try:
            tracked = (candidate.root.parent / "latest_checkpointed_iteration.txt").read_text().strip()
        except OSError:
            return False
        return tracked.isdecimal() and int(tracked) >= candidate.step


class Dcp(Recipe):
    """`.metadata` is renamed into place when all files are there; the folder's last number is the step."""

    def find(self, folder: Path) -> Iterator[Candidate]:
        for path in _children(folder):
            if number := _LAST_NUMBER.search(path.name):
                yield from _whole(path, int(number[1]))

    def complete(self, candidate: Candidate) -> bool:
        return ".metadata" in candidate.names


class File(Recipe):
    """A file that is overwritten in place again and again, as nanoGPT's `ckpt.pt`: it is copied."""

    def find(self, folder: Path) -> Iterator[Candidate]:
        for path in _children(folder):
            if path.suffix in (".pt", ".pth", ".bin", ".safetensors") and not _TEMPORARY.search(path.name):
                yield from _single(path, in_place=True)

    def complete(self, candidate: Candidate) -> bool:
        path = candidate.root / candidate.names[0]
        return path.suffix not in (".pt", ".pth") or zipfile.is_zipfile(path)


RECIPES: dict[str, Recipe] = {
    "hf": HuggingFace(),
    "lightning": Lightning(),
    "megatron": Megatron(),
    "dcp": Dcp(),
    "file": File(),
}


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _folders(folder: Path, pattern: re.Pattern[str]) -> Iterator[Candidate]:
    for path in _children(folder):
        if number := pattern.fullmatch(path.name):
            yield from _whole(path, int(number[1]))


def _whole(root: Path, step: int) -> Iterator[Candidate]:
    """All regular files below a folder; links are not followed, they may lead anywhere."""
    if root.is_symlink() or not root.is_dir():
        return
    names = [
        str((Path(where) / name).relative_to(root)) for where, _, files in os.walk(root) for name in files
    ]
    yield from _candidate(step, root, names)


def _single(path: Path, *, in_place: bool) -> Iterator[Candidate]:
    """Its step is in its name, or else the time at which it was written."""
    if number := _STEP_IN_NAME.search(path.stem):
        yield from _candidate(int(number[1]), path.parent, [path.name], in_place=in_place)
        return
    series = _NOT_FOR_A_RUN.sub("-", path.stem)
    with suppress(FileNotFoundError):
        step = int(path.lstat().st_mtime)
        yield from _candidate(step, path.parent, [path.name], series=series, in_place=in_place)


def _candidate(
    step: int, root: Path, names: list[str], *, series: str = "", in_place: bool = False
) -> Iterator[Candidate]:
    """Nothing, when a file went away, or there is none."""
    seen = xxhash.xxh3_64(str(step).encode())
    kept: list[str] = []
    changed_at = 0.0
    for name in sorted(names):
        try:
            found = (root / name).lstat()
        except FileNotFoundError:
            return
        if stat.S_ISREG(found.st_mode):
            kept.append(name)
            changed_at = max(changed_at, found.st_mtime)
            seen.update(f"\0{name}\0{found.st_ino}\0{found.st_size}\0{found.st_mtime_ns}".encode())
    if kept:
        yield Candidate(step, root, tuple(kept), changed_at, seen.hexdigest(), series, in_place)
