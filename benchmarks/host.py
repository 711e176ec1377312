"""The machine itself: its disk as `dd` sees it, its cores."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DD_BLOCK_BYTES = 16 << 20


def dd(*arguments: str) -> float:
    """Seconds that it took, in blocks of DD_BLOCK_BYTES."""
    began_at = time.perf_counter()
    subprocess.run(["dd", *arguments, f"bs={DD_BLOCK_BYTES}", "status=none"], check=True)
    return time.perf_counter() - began_at


def confine(pid: int, cores: set[int]) -> None:
    """All threads that the process has now; those that it starts inherit it."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


@contextmanager
def confined(cores: set[int]) -> Iterator[None]:
    """This thread, and those that it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
