"""Framed messages with file descriptors over a Unix stream socket (unix(7), SCM_RIGHTS).

A frame is: length of the body (u32, little endian), number of descriptors (u8), three zero
bytes, then the body. Descriptors ride on the header. The server is asynchronous, one task group
per connection, so that a closed connection cancels what it asked for; the client is synchronous,
one request at a time.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import anyio
import structlog
from anyio.abc import UNIXSocketStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from forebay.core.errors import (
    AlreadyRunning,
    DaemonUnavailable,
    ForebayError,
    ProtocolError,
    WaitTimeout,
    root_cause,
)
from forebay.core.protocol import VERSION, Failure, Hello, Message, Welcome, decode, encode
from forebay.core.systemd import inherited

log = structlog.get_logger()

_HEADER = struct.Struct("<IB3x")
_MAX_FDS = 16
_MAX_BODY_BYTES = 256 << 20
CONNECT_S = 5.0

HUNG_UP = (
    anyio.EndOfStream,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    ConnectionError,
    TimeoutError,
)

Fds = Sequence[int]
Reply = tuple[Message, Fds]
Handler = Callable[[Message, list[int]], Awaitable[Reply]]
Request = tuple[Message, list[int]]
M = TypeVar("M", bound=Message)


def close_all(fds: Fds) -> None:
    for fd in fds:
        os.close(fd)


# Server


async def listen(path: Path) -> anyio.abc.SocketListener:
    """systemd's socket, or our own: a stale file of a dead daemon is replaced, a live daemon's is not."""
    if sock := inherited(path):
        return await anyio.abc.SocketListener.from_socket(sock)
    make_room_for(path)
    return await anyio.create_unix_listener(path, mode=0o660, backlog=1024)


def make_room_for(path: Path) -> None:
    """Where a socket of a dead process lies. Raises AlreadyRunning when it is alive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise AlreadyRunning(f"a daemon already answers on {path}")
        path.unlink()


async def serve(
    listener: anyio.abc.SocketListener,
    daemon: str,
    open_session: Callable[[], AbstractAsyncContextManager[Handler]],
) -> None:
    """Serve until cancelled. `open_session` is entered per connection and left when it closes."""

    async def connection(stream: anyio.abc.SocketStream) -> None:
        assert isinstance(stream, UNIXSocketStream)
        async with stream:
            try:
                await _greet(stream, daemon)
                async with open_session() as handler:
                    await _converse(stream, handler)
            except* HUNG_UP:
                pass
            except* ProtocolError as errors:
                log.warning("connection refused", reason=str(root_cause(errors)))
            except* Exception:
                # A fault in one request ends that session, not everybody's daemon.
                log.exception("session failed")

    await listener.serve(connection)


async def _greet(stream: UNIXSocketStream, daemon: str) -> None:
    with anyio.fail_after(CONNECT_S):
        hello, fds = await receive_frame(stream)
    close_all(fds)
    if not isinstance(hello, Hello) or hello.version != VERSION:
        refusal = ProtocolError(f"{daemon} speaks version {VERSION}, the client said {hello}")
        await send_frame(stream, Failure.of(refusal), ())
        raise refusal
    await send_frame(stream, Welcome(daemon, os.getpid()), ())


async def _converse(stream: UNIXSocketStream, handler: Handler) -> None:
    """Answer requests in order; the end of the stream cancels the one being worked on."""
    send, receive = anyio.create_memory_object_stream[Request](1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_answer, stream, handler, receive)
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, ConnectionError):
            await _read(stream, send)
        tasks.cancel_scope.cancel()


async def _read(stream: UNIXSocketStream, send: MemoryObjectSendStream[Request]) -> None:
    async with send:
        while True:
            await send.send(await receive_frame(stream))


async def _answer(
    stream: UNIXSocketStream, handler: Handler, receive: MemoryObjectReceiveStream[Request]
) -> None:
    async with receive:
        async for message, fds in receive:
            try:
                reply, reply_fds = await handler(message, fds)
            except ForebayError as err:
                reply, reply_fds = Failure.of(err), ()
            except OSError as err:
                log.error("request failed", request=type(message).__name__, error=str(err))
                reply, reply_fds = Failure("error", f"{type(message).__name__} failed: {err}"), ()
            finally:
                close_all(fds)
            try:
                await send_frame(stream, reply, reply_fds)
            except (anyio.BrokenResourceError, ConnectionError):
                return
            finally:
                close_all(reply_fds)


async def send_frame(stream: UNIXSocketStream, message: Message, fds: Fds) -> None:
    body = encode(message)
    header = _HEADER.pack(len(body), len(fds))
    if fds:
        await stream.send_fds(header, list(fds))
        await stream.send(body)
    else:
        await stream.send(header + body)


async def receive_frame(stream: UNIXSocketStream) -> Request:
    header, fds = b"", list[int]()
    while len(header) < _HEADER.size:
        part, more = await stream.receive_fds(_HEADER.size - len(header), _MAX_FDS)
        header, fds = header + part, fds + more
    length = _check_header(header, fds)
    body = bytearray()
    while len(body) < length:
        body += await stream.receive(min(length - len(body), 1 << 20))
    return decode(bytes(body)), fds


def _check_header(header: bytes, fds: list[int]) -> int:
    length, fd_count = _HEADER.unpack(header)
    if length > _MAX_BODY_BYTES or fd_count != len(fds):
        close_all(fds)
        raise ProtocolError(f"a frame of {length} bytes with {len(fds)} of {fd_count} descriptors")
    for fd in fds:
        os.set_inheritable(fd, False)
    return int(length)


# Client


class Channel:
    """A client's connection. Thread-safe; one request is on the way at a time."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self.path = path
        self._lock = threading.Lock()
        self.daemon_pid = 0

    @classmethod
    def connect(cls, path: Path, role: str) -> Channel:
        """Raises DaemonUnavailable when nobody listens there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_S)
        channel = cls(sock, path)
        try:
            sock.connect(str(path))
        except OSError as err:
            sock.close()
            raise DaemonUnavailable(f"nobody answers on {path} ({err.strerror or err})") from err
        try:
            welcome, _ = channel.request(Hello(role, os.getpid()), expect=Welcome, timeout_s=CONNECT_S)
        except BaseException:
            channel.close()
            raise
        channel.daemon_pid = welcome.pid
        return channel

    def request(
        self,
        message: Message,
        *,
        expect: type[M],
        fds: Fds = (),
        timeout_s: float = 30.0,
    ) -> tuple[M, list[int]]:
        """Send, and wait for the one reply. The caller owns the descriptors that come with it.

        Raises the error that the daemon raised; DaemonUnavailable when the connection ends;
        WaitTimeout after `timeout_s` (the channel is closed then: a late reply has no taker).
        """
        with self._lock:
            try:
                self._sock.settimeout(timeout_s)
                self._write(encode(message), fds)
                reply, reply_fds = self._read()
            except TimeoutError as err:
                self.close()
                raise WaitTimeout(
                    f"{self.path} did not answer {type(message).__name__} within {timeout_s:g} s"
                ) from err
            except OSError as err:
                self.close()
                raise DaemonUnavailable(f"the daemon at {self.path} went away ({err})") from err
        if isinstance(reply, Failure):
            raise reply.error()
        if not isinstance(reply, expect):
            close_all(reply_fds)
            raise ProtocolError(f"{type(message).__name__} was answered with {type(reply).__name__}")
        return reply, reply_fds

    def _write(self, body: bytes, fds: Fds) -> None:
        header = _HEADER.pack(len(body), len(fds))
        if fds:
            socket.send_fds(self._sock, [header], list(fds))
            self._sock.sendall(body)
        else:
            self._sock.sendall(header + body)

    def _read(self) -> Request:
        header, fds = b"", list[int]()
        while len(header) < _HEADER.size:
            part, more, _, _ = socket.recv_fds(
                self._sock, _HEADER.size - len(header), _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
            if not part:
                raise ConnectionResetError("connection closed")
            header, fds = header + part, fds + more
        length = _check_header(header, fds)
        body = bytearray(length)
        view = memoryview(body)
        while view:
            got = self._sock.recv_into(view)
            if not got:
                close_all(fds)
                raise ConnectionResetError("connection closed")
            view = view[got:]
        return decode(bytes(body)), fds

    def close(self) -> None:
        """Ends the connection; a request that another thread waits in fails at once.

        In a forked copy of the process it only lets go of it.
        """
        if os.getpid() == self._pid:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ask(path: Path, message: Message, *, expect: type[M], role: str = "cli", timeout_s: float = 60.0) -> M:
    """One request on a connection of its own; descriptors of the reply are closed."""
    with Channel.connect(path, role) as channel:
        reply, fds = channel.request(message, expect=expect, timeout_s=timeout_s)
        close_all(fds)
        return reply
