"""A TCP relay before a server that notes when a request of one kind first comes by."""

from __future__ import annotations

import select
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_CHUNK_BYTES = 1 << 20


class Tap:
    def __init__(self, upstream_port: int, begins: bytes) -> None:
        self._upstream_port = upstream_port
        self._begins = begins
        self._heard = threading.Event()
        self._at = 0.0
        self.url = ""

    def arm(self) -> None:
        self._heard.clear()

    def heard_at(self, *, timeout_s: float) -> float:
        """Of time.perf_counter(). Raises TimeoutError."""
        if not self._heard.wait(timeout_s):
            raise TimeoutError(f"no {self._begins.decode()} within {timeout_s:g} s")
        return self._at

    def relay(self, client: socket.socket) -> None:
        """Both ways until either side ends."""
        with socket.create_connection(("127.0.0.1", self._upstream_port)) as server:
            ways = {client: server, server: client}
            while True:
                for source in select.select(list(ways), [], [])[0]:
                    data = source.recv(_CHUNK_BYTES)
                    if not data:
                        return
                    if source is client:
                        self._look(data)
                    ways[source].sendall(data)

    def _look(self, data: bytes) -> None:
        if not self._heard.is_set() and data.startswith(self._begins):
            self._at = time.perf_counter()
            self._heard.set()


@contextmanager
def tapped(upstream_port: int, begins: bytes) -> Iterator[Tap]:
    """Listens on loopback until the block ends; `tap.url` is its endpoint."""
    tap = Tap(upstream_port, begins)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            tap.relay(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        tap.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield tap
        finally:
            server.shutdown()
            thread.join()
