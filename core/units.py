"""Byte counts for people."""

from __future__ import annotations

import re

from pydantic import ByteSize


def format_bytes(size_bytes: float) -> str:
    """`1536` -> `1.5KiB`."""
    return ByteSize(int(size_bytes)).human_readable()


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


def parse_duration(text: str) -> float:
    """`25s`, `10m`, `1.5h`, `2d`, or plain seconds -> seconds. Raises ValueError."""
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is no length of time (like 25s, 10m, 1.5h)")
    return float(found[1]) * _UNIT_S[found[2]]
