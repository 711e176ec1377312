"""What tests share: a real S3 server for the session, and a node of its own for each test."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import obstore
import pytest

from forebay.benchmarks.daemons import start_daemon
from forebay.benchmarks.loads import tar_bytes
from forebay.benchmarks.seaweed import S3Server, running_server
from forebay.core.channel import Channel, ask
from forebay.core.config import Settings
from forebay.core.protocol import GetStatus, StagerStatus

# How long an example takes is no property of it.
hypothesis.settings.register_profile("forebay", deadline=None)
hypothesis.settings.load_profile("forebay")


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """SeaweedFS on loopback, and the AWS_* variables that lead to it."""
    with running_server() as server:
        before = dict(os.environ)
        os.environ.update(server.env)
        yield server
        os.environ.clear()
        os.environ.update(before)


_prefixes = itertools.count()


@pytest.fixture
def prefix(s3: S3Server) -> str:
    """A prefix in the bucket that no other test uses."""
    return f"test-{next(_prefixes)}"


class Node:
    """Daemons on a home of their own. What `FOREBAY_*` variables say holds for this process too."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = home
        self._monkeypatch = monkeypatch
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.set(FOREBAY_HOME=str(home / "fb"), FOREBAY_STAGER__RESERVE="0")

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    @property
    def settings(self) -> Settings:
        return Settings.load()

    @property
    def objects(self) -> Path:
        return self.settings.hot_dirs[0] / "forebay/objects"

    def start(self, part: str = "stager") -> subprocess.Popen[bytes]:
        self._processes[part] = start_daemon(part, {}, self.home / f"{part}.log")
        return self._processes[part]

    def kill(self, part: str = "stager") -> None:
        """SIGKILL, and wait until it is gone."""
        self._processes[part].kill()
        self._processes[part].wait()

    def stop(self, part: str) -> None:
        self._processes[part].send_signal(signal.SIGTERM)
        self._processes[part].wait(timeout=15)

    def log(self, part: str) -> str:
        return (self.home / f"{part}.log").read_text()

    def spool_temporaries(self) -> list[Path]:
        """What checkpointd has begun to write, or left over."""
        return list((self.settings.spool_dir / "runs").rglob(".forebay-*"))

    def connect(self) -> Channel:
        return Channel.connect(self.settings.stager_socket, "test")

    def stager(self) -> StagerStatus:
        return ask(self.settings.stager_socket, GetStatus(), expect=StagerStatus)

    def tell(self) -> None:
        """The last of what each daemon said; pytest shows it with a test that failed."""
        for part in self._processes:
            print(f"{part}:", *self.log(part).splitlines()[-40:], sep="\n")

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    # Not tmp_path: a socket's path must stay below 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix="fb-"))
    found = Node(folder, monkeypatch)
    yield found
    found.close()
    found.tell()
    shutil.rmtree(folder)


def stats_below(folder: Path) -> dict[Path, os.stat_result]:
    """Of the files there; what a daemon renames or removes meanwhile is left out."""
    found = {}
    # Unlike rglob it passes over a folder that goes while it is walked.
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    found[path] = path.stat()
    return found


def shard_bytes(shard: int, samples: int, sample_bytes: int = 100) -> bytes:
    """A shard whose samples name themselves: key `s-i`, field `id` with the same text, `bin` filler."""
    members = []
    for sample in range(samples):
        name = f"{shard:03d}-{sample:04d}"
        members.append((f"{name}.bin", bytes([shard % 256]) * sample_bytes))
        members.append((f"{name}.id", name.encode()))
    return tar_bytes(members)


@pytest.fixture
def make_dataset(s3: S3Server, prefix: str) -> Callable[[list[int], int], str]:
    """Upload shards with these numbers of samples; the URL of the dataset."""

    def make(samples: list[int], sample_bytes: int = 100) -> str:
        for shard, count in enumerate(samples):
            data = shard_bytes(shard, count, sample_bytes)
            obstore.put(s3.store(), f"{prefix}/shard-{shard:03d}.tar", data, use_multipart=False)
        return s3.url(prefix)

    return make


def eventually(check: Callable[[], bool], within_s: float = 10.0) -> bool:
    """For what another process does in its own time; true at once when it holds."""
    deadline = time.monotonic() + within_s
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
