"""How a source is reached: TLS with an authority of its own, a proxy, credentials of the machine."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme
from anyio.from_thread import start_blocking_portal

from forebay.benchmarks.seaweed import S3Server
from forebay.core.channel import Channel
from forebay.core.errors import ForebayError
from forebay.core.protocol import DatasetReply, Register
from tests.conftest import Node, eventually, shard_bytes
from tests.integration.test_stager import MakeDataset, read_shard, register

KB = 1000
_HEAD_END = b"\r\n\r\n"

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, ssl.SSLError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    far_reader, far_writer = await asyncio.open_connection(host, port)
    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))


@contextmanager
def listening(accept: Accept, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server on a free port of loopback, in a loop of its own, for as long as the block lasts."""
    with start_blocking_portal() as portal:

        async def begin() -> asyncio.Server:
            return await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)

        server = portal.call(begin)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            portal.call(server.close)


class Secure:
    """The S3 server behind TLS, and behind a proxy that notes who it was asked for."""

    def __init__(self, s3: S3Server, folder: Path) -> None:
        self._s3_port = int(s3.endpoint.rpartition(":")[2])
        self.authority = trustme.CA()
        self.ca_file = folder / "authority.pem"
        self.authority.cert_pem.write_to_path(str(self.ca_file))
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert("localhost").configure_cert(self.context)
        self.asked: list[str] = []
        self.endpoint = self.proxy = ""

    async def terminate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join(reader, writer, "127.0.0.1", self._s3_port)

    async def tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """CONNECT (RFC 9110, section 9.3.6)."""
        head = await reader.readuntil(_HEAD_END)
        method, target, _ = head.split(b" ", 2)
        self.asked.append(f"{method.decode()} {target.decode()}")
        writer.write(b"HTTP/1.1 200 Connection established" + _HEAD_END)
        await join(reader, writer, "127.0.0.1", int(target.rpartition(b":")[2]))


@pytest.fixture
def secure(s3: S3Server, tmp_path: Path) -> Iterator[Secure]:
    found = Secure(s3, tmp_path)
    with ExitStack() as stack:
        found.endpoint = f"https://localhost:{stack.enter_context(listening(found.terminate, found.context))}"
        found.proxy = f"http://127.0.0.1:{stack.enter_context(listening(found.tunnel))}"
        yield found


def configure(node: Node, *lines: str) -> None:
    path = node.home / "forebay.toml"
    path.write_text("\n".join(["[[source]]", 'url = "s3://forebay"', *lines, ""]))
    node.set(FOREBAY_CONFIG=str(path))


def ask_for(channel: Channel, url: str) -> DatasetReply:
    return channel.request(Register(url, "webdataset"), expect=DatasetReply)[0]


def test_tls_with_an_authority_of_its_own_through_a_proxy(
    node: Node, make_dataset: MakeDataset, secure: Secure
):
    url = make_dataset([3, 5], KB)
    configure(node, f'ca_file = "{secure.ca_file}"', f'proxy = "{secure.proxy}"')
    node.set(AWS_ENDPOINT_URL=secure.endpoint)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        assert read_shard(channel, dataset, 1) == shard_bytes(1, 5, KB)
    assert set(secure.asked) == {f"CONNECT {secure.endpoint.removeprefix('https://')}"}


def test_a_certificate_of_nobody_known_is_refused_and_said(
    node: Node, make_dataset: MakeDataset, secure: Secure
):
    url = make_dataset([3], KB)
    node.set(AWS_ENDPOINT_URL=secure.endpoint, FOREBAY_TRANSFER__ATTEMPTS="1")
    node.start()
    with node.connect() as channel, pytest.raises(ForebayError, match="certificate") as caught:
        ask_for(channel, url)
    assert "ca_file" in caught.value.hint


def test_a_proxy_that_nobody_answers_on_is_an_error_in_time(node: Node, make_dataset: MakeDataset):
    url = make_dataset([3], KB)
    configure(node, 'proxy = "http://127.0.0.1:1"')
    node.set(FOREBAY_TRANSFER__ATTEMPTS="1")
    node.start()
    with node.connect() as channel, pytest.raises(ForebayError) as caught:
        ask_for(channel, url)
    assert caught.value.code == "store_unreachable"


@contextmanager
def metadata_service(s3: S3Server) -> Iterator[tuple[str, list[str]]]:
    """Instance metadata, version 2, as EC2 has it; keys that last for a minute; what was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _say(self, text: str) -> None:
            asked.append(f"{self.command} {self.path}")
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            self._say("session-token")

        def do_GET(self) -> None:
            if not self.path.endswith("/node-role"):
                self._say("node-role")
                return
            ends_at = datetime.now(UTC) + timedelta(minutes=1)
            keys = {"AccessKeyId": s3.access_key, "SecretAccessKey": s3.secret_key, "Token": ""}
            self._say(json.dumps({**keys, "Code": "Success", "Expiration": ends_at.isoformat()}))

        def log_message(self, *_args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_credentials_of_the_machine(
    node: Node, make_dataset: MakeDataset, s3: S3Server, monkeypatch: pytest.MonkeyPatch
):
    """No keys in the environment: instance metadata is asked, and again as the keys run out."""
    url = make_dataset([3] * 4, KB)
    for name in [name for name in os.environ if name.startswith("AWS_") and "KEY" in name]:
        monkeypatch.delenv(name)
    with metadata_service(s3) as (endpoint, asked):
        node.set(AWS_METADATA_ENDPOINT=endpoint, HOME=str(node.home))
        node.start()
        with node.connect() as channel:
            dataset = register(channel, url)
            asked_before = len(asked)
            assert read_shard(channel, dataset, 2) == shard_bytes(2, 3, KB)
            assert eventually(lambda: bool(register(channel, url)) and len(asked) > asked_before)
    assert asked[0].startswith("PUT /latest/api/token")
