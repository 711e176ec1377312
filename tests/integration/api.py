"""The API as a service on a node of its own, for tests that ask it."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.api.auth.tokens import TokenBook
from forebay.api.client import Client
from forebay.benchmarks.seaweed import free_ports
from tests.conftest import Node

PARTS = ("stager", "checkpoint", "api")
KB = 1000
# Larger than the shards that go several at a time, so that each moves the job by itself.
BIG = 300 * KB


class Service:
    """Three daemons, each by itself, so that a test can end and begin one."""

    def __init__(self, node: Node, **variables: str) -> None:
        self.node = node
        self.port = free_ports(1)[0]
        node.set(FOREBAY_API__PORT=str(self.port), FOREBAY_CHECKPOINT__DRAIN_S="0", **variables)
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, *parts: str) -> Service:
        for part in parts or PARTS:
            self.node.start(part)
        return self

    def http(self, token: str | None = None, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, **options)

    def client(self, token: str | None = None, **options: Any) -> Client:
        return Client(self.url, token=token, **options)

    def token(self, *scopes: str, tenant: str | None = None, name: str = "test") -> str:
        return TokenBook(self.node.settings.home).create(name, list(scopes), tenant)[1]

    def socket(self) -> socket.socket:
        """A bare connection, for what no HTTP client sends."""
        return socket.create_connection(("127.0.0.1", self.port), 20)

    def audit(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.node.log("api").splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == "audit"]


def slow_source(service: Service, rate_bps: int = 1500 * KB) -> None:
    """Staging takes seconds then, so that there is something to follow."""
    service.node.set(FOREBAY_SOURCE=json.dumps([{"url": "s3://forebay", "rate": rate_bps}]))


@contextmanager
def own_node() -> Iterator[Node]:
    """For a service that several tests of a module ask."""
    folder = Path(tempfile.mkdtemp(prefix="fb-"))
    with pytest.MonkeyPatch.context() as patch:
        node = Node(folder, patch)
        try:
            yield node
        finally:
            node.close()
            node.tell()
            shutil.rmtree(folder)


def read_until_closed(sock: socket.socket, within_s: float = 20.0) -> bytes:
    """What the other side sends until it hangs up. Raises TimeoutError when it does not."""
    sock.settimeout(within_s)
    parts = []
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            part = sock.recv(65536)
        except ConnectionResetError:
            break
        if not part:
            break
        parts.append(part)
    else:
        raise TimeoutError
    return b"".join(parts)


def problem(reply: httpx.Response) -> tuple[int, str]:
    """Status and code of a reply that is a problem; that it is one is checked."""
    body = reply.json()
    assert reply.headers["content-type"] == "application/problem+json", body
    assert body["status"] == reply.status_code and body["detail"], body
    return reply.status_code, body["title"]
