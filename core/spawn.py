"""A daemon as a child process that says when it is ready (sd_notify(3), the other side)."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from forebay.core.errors import DaemonUnavailable

_START_S = 30.0


def spawn(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    stdin: int | None = None,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start it; returns once it has said READY=1, or has ended by itself (then it has a returncode).

    Raises DaemonUnavailable when it says nothing for 30 s; it is killed then.
    """
    with (
        tempfile.TemporaryDirectory(prefix="forebay-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox,
    ):
        address = f"{folder}/notify"
        inbox.bind(address)
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stderr=stderr,
            env={**os.environ, **(env or {}), "NOTIFY_SOCKET": address},
        )
        ended = os.pidfd_open(process.pid)
        try:
            heard, _, _ = select.select([inbox.fileno(), ended], [], [], _START_S)
        finally:
            os.close(ended)
        if inbox.fileno() in heard:
            return process
    if not heard:
        process.kill()
    status = process.wait()
    if not heard:
        raise DaemonUnavailable(f"{' '.join(command)} did not get ready in {_START_S:g} s ({status})")
    return process
