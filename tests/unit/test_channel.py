"""Channels: descriptors arrive, a hang-up is noticed, strangers are refused."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc
import pytest
from anyio.from_thread import start_blocking_portal

from forebay.core import channel
from forebay.core.channel import Channel, Handler, Reply
from forebay.core.errors import (
    AlreadyRunning,
    DaemonUnavailable,
    DatasetNotFound,
    ProtocolError,
    WaitTimeout,
)
from forebay.core.protocol import Done, GetMetrics, GetStatus, Hello, Message, MetricsText, WaitJob, Welcome
from tests.conftest import eventually


class Echo:
    """A daemon for these tests. Requests choose what happens."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed = threading.Event()
        self.cancelled = threading.Event()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Handler]:
        self.opened += 1
        try:
            yield self.handle
        finally:
            self.closed.set()

    async def handle(self, message: Message, fds: list[int]) -> Reply:
        if isinstance(message, GetMetrics):
            text = b"".join(os.pread(fd, 100, 0) for fd in fds).decode()
            return MetricsText(text), [os.dup(fd) for fd in fds]
        if isinstance(message, WaitJob):
            try:
                await anyio.sleep_forever()
            except BaseException:
                self.cancelled.set()
                raise
        if isinstance(message, GetStatus):
            raise DatasetNotFound("no such thing", hint="look elsewhere")
        if isinstance(message, Done):
            raise ZeroDivisionError
        raise ProtocolError("what?")


@contextmanager
def serving(path: Path, echo: Echo) -> Iterator[None]:
    async def main(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with await channel.listen(path) as listener:
            task_status.started()
            await channel.serve(listener, "echo", echo.session)

    with start_blocking_portal() as portal:
        future, _ = portal.start_task(main)
        yield
        future.cancel()


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "s"


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_go_both_ways_and_none_leaks(path: Path, tmp_path: Path):
    files = []
    for number in range(3):
        (tmp_path / str(number)).write_text(str(number))
        files.append(os.open(tmp_path / str(number), os.O_RDONLY))
    with serving(path, Echo()), Channel.connect(path, "test") as client:
        client.request(GetMetrics(), expect=MetricsText)
        before = open_fds()
        for _ in range(50):
            reply, fds = client.request(GetMetrics(), expect=MetricsText, fds=files)
            assert reply.text == "012" and [os.pread(fd, 9, 0) for fd in fds] == [b"0", b"1", b"2"]
            assert not any(os.get_inheritable(fd) for fd in fds)
            channel.close_all(fds)
        # The daemon, in this process too, closes its own copies just after it has sent them.
        assert eventually(lambda: open_fds() == before)
    channel.close_all(files)


def test_the_daemons_error_is_raised_at_the_client(path: Path):
    with serving(path, Echo()), Channel.connect(path, "test") as client:
        with pytest.raises(DatasetNotFound, match=r"no such thing \(look elsewhere\)"):
            client.request(GetStatus(), expect=Done)
        assert client.request(GetMetrics(), expect=MetricsText)[0].text == ""


def test_a_hang_up_cancels_the_request_and_ends_the_session(path: Path):
    """Idea 2 of DESIGN: a lease is a connection."""
    echo = Echo()
    with serving(path, echo):
        client = Channel.connect(path, "test")
        with pytest.raises(WaitTimeout):
            client.request(WaitJob("x"), expect=Done, timeout_s=0.2)
        assert echo.cancelled.wait(5) and echo.closed.wait(5)


def test_a_fault_in_a_handler_ends_one_session_not_the_daemon(path: Path):
    with serving(path, Echo()):
        with Channel.connect(path, "test") as client, pytest.raises(DaemonUnavailable):
            client.request(Done(), expect=Done)
        with Channel.connect(path, "test") as client:
            client.request(GetMetrics(), expect=MetricsText)


def test_nobody_there(path: Path):
    with pytest.raises(DaemonUnavailable, match="forebay up"):
        Channel.connect(path, "test")


def test_a_stale_socket_is_replaced_a_live_one_is_not(path: Path):
    """F3."""
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with serving(path, Echo()):
        Channel.connect(path, "test").close()
        with pytest.raises(AlreadyRunning):
            anyio.run(channel.listen, path)
        Channel.connect(path, "test").close()


@pytest.mark.parametrize(
    "send",
    [
        lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n\r\n"),
        lambda sock: sock.sendall(b"\x04\0\0\0\0\0\0\0\xff\xff\xff\xff"),
        lambda sock: sock.sendall(channel._HEADER.pack(1 << 31, 0)),
        lambda sock: sock.sendall(channel._HEADER.pack(4, 3) + b"aaaa"),
    ],
)
def test_garbage_ends_the_connection_not_the_daemon(path: Path, send: Callable[[socket.socket], None]):
    with serving(path, Echo()):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.settimeout(5)
            send(sock)
            with suppress(ConnectionResetError):
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
        Channel.connect(path, "test").close()


def test_another_version_is_refused_by_name(path: Path):
    with serving(path, Echo()), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        with pytest.raises(ProtocolError, match="speaks version"):
            Channel(sock, path).request(Hello("test", 1, version=99), expect=Welcome, timeout_s=5)
