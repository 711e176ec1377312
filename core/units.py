"""Byte counts for people."""

from __future__ import annotations

from pydantic import ByteSize


def format_bytes(size_bytes: float) -> str:
    """`1536` -> `1.5KiB`."""
    return ByteSize(int(size_bytes)).human_readable()
