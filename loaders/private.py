"""No daemon on this machine? Then a private stagerd, as a child that lives as long as this process.

A child, not a thread: transfers and checksums would take the trainer's GIL (DESIGN, idea 7), and
only another process can remove a temporary cache after this one was killed.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from forebay.core.channel import Channel
from forebay.core.config import Settings
from forebay.core.errors import DaemonUnavailable
from forebay.core.spawn import spawn

log = logging.getLogger("forebay.loaders")

_START_S = 30.0
_PAUSE_S = 0.1
_lock = threading.Lock()
# This module's, in a forked copy the original's.
_owner = os.getpid()
_children: dict[Path, subprocess.Popen[bytes]] = {}
_temporary_home: Path | None = None
_said: set[Path] = set()


def connect_private(cache_dir: Path | None) -> Channel:
    """A connection to a stagerd on `cache_dir` (or a temporary directory), started if need be.

    Several processes that name one directory share its stagerd: who comes second waits until the
    first one's answers. Raises DaemonUnavailable.
    """
    deadline = time.monotonic() + _START_S
    while True:
        path = _private_socket(cache_dir)
        try:
            return Channel.connect(path, "loader")
        except DaemonUnavailable:
            if time.monotonic() > deadline:
                raise
            threading.Event().wait(_PAUSE_S)


def _private_socket(cache_dir: Path | None) -> Path:
    global _temporary_home
    with _lock:
        if cache_dir is None and _temporary_home is None:
            _temporary_home = Path(tempfile.mkdtemp(prefix="forebay-"))
        home = cache_dir.absolute() if cache_dir else _temporary_home
        assert home is not None
        child = _children.get(home)
        # A forked copy of the process that started it cannot ask how it is, and uses it all the same.
        if child is None or (os.getpid() == _owner and child.poll() is not None):
            _say_once(home, "" if cache_dir else ", which is removed at exit")
            child = _start(home, temporary=cache_dir is None)
            if child is not None:
                _children[home] = child
        return Settings.load(home=home).stager_socket


def _say_once(home: Path, fate: str) -> None:
    if home not in _said:
        _said.add(home)
        log.warning(
            "no stagerd here: starting a private one on %s%s; `forebay up` starts a shared one", home, fate
        )


def _start(home: Path, *, temporary: bool) -> subprocess.Popen[bytes] | None:
    """None when another process serves that directory already."""
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "forebay.stager", "--home", str(home)]
    child = spawn(command + (["--temporary"] if temporary else []), stdin=subprocess.PIPE)
    if child.returncode:
        raise DaemonUnavailable(
            f"a private stagerd on {home} did not start (exit status {child.returncode})",
            hint="its messages are above",
        )
    return child if child.returncode is None else None


@atexit.register
def _stop_children() -> None:
    """Closing the pipe is the signal; a child that we still own is waited for, within reason."""
    if os.getpid() != _owner:
        return
    for child in _children.values():
        if child.stdin:
            child.stdin.close()
    for child in _children.values():
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
