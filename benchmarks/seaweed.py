"""A real S3 server for benches, demo and tests: SeaweedFS from PyPI, on loopback, for as long as asked.

https://github.com/seaweedfs/seaweedfs (`weed server`); all of its ports are free ones.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import obstore
from obstore.store import S3Store

from forebay.core.errors import StoreUnreachable

_START_S = 60.0
_TRIES = 3
_PAUSE_S = 0.1
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "s3.port.iceberg",
    "s3.port.lance",
)


@dataclass(frozen=True)
class S3Server:
    """Where it is and how to get in. `env` is what Forebay and every S3 client read.

    `filer` is what `weed mount -filer` takes.
    """

    endpoint: str
    access_key: str
    secret_key: str
    bucket: str
    filer: str

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def url(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"

    def store(self) -> S3Store:
        """The bucket through obstore alone, for filling it and looking at it."""
        return S3Store(
            self.bucket,
            endpoint=self.endpoint,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            region="us-east-1",
            client_options={"allow_http": True},
        )


@contextmanager
def running_server(bucket: str = "forebay") -> Iterator[S3Server]:
    """Start, make the bucket, yield, end. Raises StoreUnreachable when it does not come up."""
    with ExitStack() as stack:
        server, process = _started(stack, bucket, _TRIES)
        stack.callback(_stop, process)
        yield server


def _started(stack: ExitStack, bucket: str, tries: int) -> tuple[S3Server, subprocess.Popen[bytes]]:
    """On other ports again when it ended by itself: one may have been taken since they were found free."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-s3-")))
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    server = S3Server(
        endpoint=f"http://127.0.0.1:{ports['s3.port']}",
        access_key="forebay-demo",
        secret_key="not-a-secret",
        bucket=bucket,
        filer=f"127.0.0.1:{ports['filer.port']}.{ports['filer.port.grpc']}",
    )
    process = _start(folder, server, ports)
    try:
        _wait(process, server, folder / "log")
    except BaseException as err:
        ended = process.poll() is not None
        _stop(process)
        if isinstance(err, StoreUnreachable) and ended and tries > 1:
            return _started(stack, bucket, tries - 1)
        raise
    return server, process


def _start(folder: Path, server: S3Server, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    credentials = {"accessKey": server.access_key, "secretKey": server.secret_key}
    identity = {"name": "forebay", "credentials": [credentials], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    return subprocess.Popen(
        [
            str(Path(sys.executable).with_name("weed")),
            "server",
            f"-dir={folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            f"-s3.config={folder / 's3.json'}",
            "-volume.max=100",
            "-master.volumeSizeLimitMB=256",
            "-master.telemetry=false",
            *(f"-{name}={port}" for name, port in ports.items()),
        ],
        stdout=(folder / "log").open("wb"),
        stderr=subprocess.STDOUT,
        preexec_fn=end_with_parent,
    )


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _wait(process: subprocess.Popen[bytes], server: S3Server, log: Path) -> None:
    """Until it takes an object. It has no way to signal, so it is asked, for a bounded time."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.endpoint}/healthz", timeout=2).close()
            obstore.put(server.store(), ".ready", b"ready")
            obstore.delete(server.store(), ".ready")
            return
        except (urllib.error.URLError, OSError, obstore.exceptions.BaseError):
            time.sleep(_PAUSE_S)
    tail = log.read_text(errors="replace")[-2000:]
    raise StoreUnreachable(f"SeaweedFS did not start within {_START_S:g} s:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """At once: its data goes with it."""
    process.kill()
    process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody holds at this moment, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
