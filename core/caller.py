"""An async client of a daemon, for a process that serves many callers at once.

Connections stay open between requests; each carries one at a time.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TypeVar

import anyio
from anyio.abc import SocketAttribute, UNIXSocketStream

from forebay.core.channel import CONNECT_S, HUNG_UP, close_all, receive_frame, send_frame
from forebay.core.errors import DaemonUnavailable, ProtocolError, WaitTimeout
from forebay.core.protocol import Failure, Hello, Message, Welcome

M = TypeVar("M", bound=Message)
_KEPT = 32


class Caller:
    """Belongs to one event loop."""

    def __init__(self, path: Path, role: str) -> None:
        self.path = path
        self._role = role
        self._idle: list[UNIXSocketStream] = []

    async def ask(self, message: Message, expect: type[M], *, timeout_s: float = 60.0) -> M:
        """The reply; descriptors that come with it are closed.

        Raises the error that the daemon raised, DaemonUnavailable, WaitTimeout.
        """
        try:
            with anyio.fail_after(timeout_s):
                reply = await self._exchange(message)
        except TimeoutError as err:
            raise WaitTimeout(
                f"{self.path.stem} did not answer {type(message).__name__} within {timeout_s:g} s"
            ) from err
        except HUNG_UP as err:
            raise DaemonUnavailable(f"the daemon at {self.path} went away ({type(err).__name__})") from err
        if isinstance(reply, Failure):
            raise reply.error()
        if not isinstance(reply, expect):
            raise ProtocolError(f"{type(message).__name__} was answered with {type(reply).__name__}")
        return reply

    async def _exchange(self, message: Message) -> Message:
        stream = self._kept() or await self._connect()
        try:
            reply = await _request(stream, message)
        except BaseException:
            # A reply may still be on its way: nobody else must get it.
            await anyio.aclose_forcefully(stream)
            raise
        if len(self._idle) < _KEPT:
            self._idle.append(stream)
        else:
            await stream.aclose()
        return reply

    def _kept(self) -> UNIXSocketStream | None:
        """One that the daemon has not closed meanwhile."""
        while self._idle:
            stream = self._idle.pop()
            raw = stream.extra(SocketAttribute.raw_socket)
            try:
                raw.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return stream
            except OSError:
                pass
            raw.close()
        return None

    async def _connect(self) -> UNIXSocketStream:
        try:
            with anyio.fail_after(CONNECT_S):
                stream = await anyio.connect_unix(self.path)
        except OSError as err:
            raise DaemonUnavailable(f"nobody answers on {self.path} ({err.strerror or err})") from err
        try:
            welcome = await _request(stream, Hello(self._role, os.getpid()))
            if not isinstance(welcome, Welcome):
                raise welcome.error() if isinstance(welcome, Failure) else ProtocolError("no welcome")
        except BaseException:
            await anyio.aclose_forcefully(stream)
            raise
        return stream

    async def aclose(self) -> None:
        while self._idle:
            await anyio.aclose_forcefully(self._idle.pop())


async def _request(stream: UNIXSocketStream, message: Message) -> Message:
    await send_frame(stream, message, ())
    reply, fds = await receive_frame(stream)
    close_all(fds)
    return reply
