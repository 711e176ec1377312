"""A daemon as a child process for benches and tests, up when the block begins, gone when it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from forebay.core.errors import DaemonUnavailable
from forebay.core.spawn import spawn


def start_daemon(part: str, env: Mapping[str, str], log: Path | None = None) -> subprocess.Popen[bytes]:
    """`forebay serve PART` with that environment, once it has said that it is ready.

    Raises DaemonUnavailable when it ends or stays silent instead.
    """
    command = [sys.executable, "-m", "forebay.api.cli", "serve", part, "--with-parent"]
    with (log or Path("/dev/null")).open("ab") as stderr:
        process = spawn(command, env, stderr=stderr)
    if process.returncode is not None:
        raise DaemonUnavailable(f"forebay serve {part} did not start (exit status {process.returncode})")
    return process


@contextmanager
def running_daemon(
    part: str, env: Mapping[str, str], log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = start_daemon(part, env, log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
