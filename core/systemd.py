"""What systemd hears from a service and gives it: sd_notify(3), its watchdog, sockets (sd_listen_fds(3))."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import anyio
import structlog

log = structlog.get_logger()

_FIRST_FD = 3


def notify(state: str) -> None:
    """Tell systemd, when it asked to be told."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
        except OSError as err:
            # Whoever started this is gone; that is no reason to go as well.
            log.warning("nobody hears", state=state, error=str(err))


async def stay_alive() -> None:
    """A sign of life at half of WatchdogSec, from the event loop: one that hangs gives none.

    Returns at once where no watchdog waits for this process (sd_watchdog_enabled(3)).
    """
    interval_us = os.environ.get("WATCHDOG_USEC")
    if not interval_us or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        notify("WATCHDOG=1")
        await anyio.sleep(int(interval_us) / 2e6)


def inherited(path: Path) -> socket.socket | None:
    """The Unix socket at `path` that systemd listens on for this process, else None.

    It outlives the daemon: who connects while that is restarted waits, and is not refused.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    there = []
    for fd in range(_FIRST_FD, _FIRST_FD + int(os.environ.get("LISTEN_FDS", "0"))):
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
        there.append(sock.getsockname())
        if sock.family == socket.AF_UNIX and there[-1] == str(path):
            return sock
        sock.detach()
    log.warning("systemd listens elsewhere", wanted=str(path), there=there)
    return None
