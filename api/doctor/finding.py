"""What a check found, and what checks are given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from forebay.core.config import Settings

Level = Literal["ok", "note", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warn", "fail")


class Finding(msgspec.Struct, frozen=True):
    """`note`: nothing to do, but to know. `fail`: a job would break, or miss what `--need` asks."""

    check: str
    level: Level
    what: str
    why: str = ""
    fix: str = ""


class Node(msgspec.Struct, frozen=True):
    """The machine that is looked at. `root` holds proc and sys; a test sets another one."""

    settings: Settings
    need_bps: int = 0
    sources: tuple[str, ...] = ()
    quick: bool = False
    root: Path = Path("/")
    env: Mapping[str, str] = os.environ

    def text(self, path: str) -> str | None:
        """Of a file below root; None where there is none, or it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def number(self, path: str) -> int | None:
        """The first number in it."""
        words = (self.text(path) or "").split()
        return int(words[0]) if words and words[0].lstrip("-").isdecimal() else None

    @property
    def sysfs(self) -> Path:
        return self.root / "sys"
