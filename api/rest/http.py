"""HTTP connections: whose they are, and how long and how large the head of a request may be.

uvicorn limits neither, so a caller who sends one byte a second would hold a connection for ever.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_BYTES = 64 << 10
_UCRED = struct.Struct("3i")
_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def protocol(receive_s: float) -> type[HttpToolsProtocol]:
    """With its time for the head of a request."""
    return type("Connection", (_Connection,), {"receive_s": receive_s})


class _Connection(HttpToolsProtocol):
    receive_s: float
    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client = _known(transport) or self.client
        self._in_head = True
        self._start()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            # The first piece may hold more than the head: only what never ends is cut off.
            if self._head_bytes - len(data) > _HEAD_BYTES:
                self._refuse(_TOO_LARGE)
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:
            self._in_head, self._head_bytes = True, 0
            self._start()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _start(self) -> None:
        self._stop()
        self._timer = self.loop.call_later(self.receive_s, self._refuse, _TIMEOUT)

    def _stop(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, answer: bytes) -> None:
        self._stop()
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()


def _known(transport: asyncio.Transport) -> tuple[str, int] | None:
    """`unix:UID:GID` of the process at the other end, or `cert:NAME`; None for everybody else."""
    raw = transport.get_extra_info("socket")
    if raw is not None and raw.family == socket.AF_UNIX:
        pid, uid, gid = _UCRED.unpack(raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return f"unix:{uid}:{gid}", pid
    certificate: dict[str, Any] | None = transport.get_extra_info("peercert")
    for group in (certificate or {}).get("subject", ()):
        for key, value in group:
            if key == "commonName":
                return f"cert:{value}", 0
    return None
