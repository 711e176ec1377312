"""Between systemd and a service, with the test in systemd's place: sockets, readiness, watchdog."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.api.client import Client
from forebay.core.channel import ask
from forebay.core.protocol import CheckpointStatus, GetStatus, StagerStatus
from tests.conftest import Node

_SERVE = "export LISTEN_PID=$$ WATCHDOG_PID=$$; exec {} -m forebay.api.cli serve {}"


@contextmanager
def inbox(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(folder / "notify"))
        found.settimeout(30)
        yield found


def start(
    node: Node, part: str, told: socket.socket, held: socket.socket, **env: str
) -> subprocess.Popen[bytes]:
    """As systemd does: the socket is descriptor 3, the pid is in the environment."""
    with (node.home / f"{part}.log").open("ab") as log:
        return subprocess.Popen(
            ["sh", "-c", _SERVE.format(sys.executable, part)],
            preexec_fn=lambda: os.dup2(held.fileno(), 3),
            close_fds=False,
            stderr=log,
            env={**os.environ, "LISTEN_FDS": "1", "NOTIFY_SOCKET": told.getsockname(), **env},
        )


def listening(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen(64)
    return sock


def until(told: socket.socket, state: bytes) -> list[bytes]:
    """What was said, up to that."""
    said = [told.recv(4096)]
    while said[-1] != state:
        said.append(told.recv(4096))
    return said


def status_of(node: Node, part: str) -> object:
    settings = node.settings
    if part == "stager":
        return ask(settings.stager_socket, GetStatus(), expect=StagerStatus, timeout_s=30)
    if part == "checkpoint":
        return ask(settings.checkpoint_socket, GetStatus(), expect=CheckpointStatus, timeout_s=30)
    with Client(f"unix://{settings.api_socket}") as client:
        return client.overview()


@pytest.mark.parametrize("part", ["stager", "checkpoint", "api"])
def test_nobody_is_refused_while_a_daemon_is_replaced(node: Node, part: str):
    """Who asks before it is there, after kill -9 and after an orderly end waits, and is answered."""
    name = {"stager": "stager_socket", "checkpoint": "checkpoint_socket", "api": "api_socket"}[part]
    path: Path = getattr(node.settings, name)
    with listening(path) as held, inbox(node.home) as told, ThreadPoolExecutor(1) as pool:
        inode = path.stat().st_ino
        for end in (signal.SIGKILL, signal.SIGTERM, signal.SIGTERM):
            early = pool.submit(status_of, node, part)
            daemon = start(node, part, told, held)
            try:
                until(told, b"READY=1")
                assert early.result(30)
            finally:
                daemon.send_signal(end)
                daemon.wait(30)
        assert path.stat().st_ino == inode, "the socket is systemd's"


def test_the_loop_gives_signs_of_life(node: Node):
    with listening(node.settings.stager_socket) as held, inbox(node.home) as told:
        daemon = start(node, "stager", told, held, WATCHDOG_USEC="200000")
        try:
            until(told, b"READY=1")
            for _ in range(5):
                until(told, b"WATCHDOG=1")
        finally:
            daemon.terminate()
            daemon.wait(30)
        until(told, b"STOPPING=1")
