"""A proxy before a real S3 server that does to requests for objects what networks and servers do."""

from __future__ import annotations

import hashlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

# What happens to one request; None: nothing.
Fault = str | None


class Proxy:
    """`faults` are used up one per `method` (GET) of an object; `asked` counts those requests."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream)
        self.method = "GET"
        self.faults: list[Fault] = []
        self.always: Fault = None
        self.asked = 0
        self.on_get: Callable[[int], None] = lambda asked: None
        self.endpoint = ""
        self._lock = threading.Lock()

    def next_fault(self) -> Fault:
        with self._lock:
            self.asked += 1
            asked = self.asked
            fault = self.faults.pop(0) if self.faults else self.always
        self.on_get(asked)
        return fault


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[Proxy]:
    proxy = Proxy(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            is_object = self.path.split("?")[0].count("/") > 1
            fault = proxy.next_fault() if is_object and self.command == proxy.method else None
            if fault and fault.isdigit():
                self._refuse(int(fault))
                return
            if fault == "redirect":
                self.send_response(307)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if fault == "stall":
                time.sleep(4)
                self.close_connection = True
                return
            if fault == "swallow":
                self._swallow()
                return
            status, headers, body = self._ask()
            self._answer(status, headers, body, fault)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def _ask(self) -> tuple[int, list[tuple[str, str]], bytes]:
            length = int(self.headers.get("Content-Length", 0))
            sent = self.rfile.read(length) if length else None
            upstream = http.client.HTTPConnection(proxy.upstream.hostname, proxy.upstream.port, timeout=30)
            try:
                upstream.request(self.command, self.path, sent, dict(self.headers))
                reply = upstream.getresponse()
                return reply.status, reply.getheaders(), reply.read()
            finally:
                upstream.close()

        def _swallow(self) -> None:
            """As if it had been taken."""
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.md5(sent).hexdigest()}"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _refuse(self, status: int) -> None:
            self.send_response(status)
            if status == 503:
                self.send_header("Retry-After", "1")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, fault: Fault) -> None:
            if fault == "flip":
                body = body[: len(body) // 2] + bytes([body[len(body) // 2] ^ 1]) + body[len(body) // 2 + 1 :]
            if fault == "lie":
                body = body[: len(body) // 2]
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    if fault == "no-etag" and name.lower() == "etag":
                        continue
                    self.send_header(name, value)
            announced = {n.lower(): v for n, v in headers}.get("content-length", str(len(body)))
            self.send_header("Content-Length", str(len(body)) if fault == "lie" else announced)
            self.end_headers()
            if self.command == "HEAD":
                return
            if fault in ("short", "reset"):
                self.wfile.write(body[: len(body) // 3])
                self._hang_up(hard=fault == "reset")
            elif fault == "drip":
                for start in range(0, len(body), max(1, len(body) // 20)):
                    self.wfile.write(body[start : start + max(1, len(body) // 20)])
                    time.sleep(0.02)
            else:
                self.wfile.write(body)

        def _hang_up(self, *, hard: bool) -> None:
            self.wfile.flush()
            if hard:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

        def handle(self) -> None:
            try:
                super().handle()
            except (OSError, ValueError):
                return

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
