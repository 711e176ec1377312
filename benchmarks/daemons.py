"""A daemon as a child process for benches and tests, up when the block begins, gone when it ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from forebay.core.errors import DaemonUnavailable

_START_S = 30.0


def start_daemon(part: str, env: Mapping[str, str], log: Path | None = None) -> subprocess.Popen[bytes]:
    """`forebay serve PART` with that environment, once it has said that it is ready.

    Raises DaemonUnavailable when it ends or stays silent instead.
    """
    with (
        tempfile.TemporaryDirectory(prefix="forebay-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready,
    ):
        ready.bind(f"{folder}/notify")
        process = subprocess.Popen(
            [sys.executable, "-m", "forebay.api.cli", "serve", part, "--with-parent"],
            env={**os.environ, **env, "NOTIFY_SOCKET": f"{folder}/notify"},
            stderr=log.open("ab") if log else subprocess.DEVNULL,
        )
        ended = os.pidfd_open(process.pid)
        try:
            signalled, _, _ = select.select([ready.fileno(), ended], [], [], _START_S)
            is_ready = ready.fileno() in signalled
        finally:
            os.close(ended)
    if not is_ready:
        process.kill()
        process.wait()
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
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
