"""A TCP proxy before the source, one port a node, each with a rate that a schedule changes as time goes on.

In a process of its own: pacing must not wait for the interpreter of whoever measures.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

_CHUNK_BYTES = 64 << 10
_LATE_S = 0.02


@dataclass(frozen=True)
class Schedule:
    """`steps`: (seconds after the start, bytes per second from then on), the first at 0."""

    steps: tuple[tuple[float, float], ...]

    def rate_bps(self, at_s: float) -> float:
        return [rate for since_s, rate in self.steps if since_s <= max(0.0, at_s)][-1]

    def arrival_s(self, size_bytes: float) -> float:
        """When so many bytes have come through, if the link was never idle."""
        ends = [since_s for since_s, _ in self.steps[1:]] + [float("inf")]
        for (since_s, rate), end_s in zip(self.steps, ends, strict=True):
            if size_bytes <= rate * (end_s - since_s):
                return since_s + size_bytes / rate
            size_bytes -= rate * (end_s - since_s)
        raise AssertionError("the last step has no end")


@dataclass(frozen=True)
class Links:
    ports: list[int]
    _control: Connection

    def start(self, at: float, schedules: Sequence[Schedule]) -> None:
        """`at`: of time.monotonic(), which all processes of a machine share."""
        self._control.send((at, list(schedules)))


@contextmanager
def throttled(upstream_port: int, schedules: Sequence[Schedule]) -> Iterator[Links]:
    """Each link begins with its first rate, until `start`."""
    context = multiprocessing.get_context("spawn")
    control, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(upstream_port, list(schedules), theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Links(control.recv(), control)
    finally:
        control.close()
        process.join(5)
        process.kill()


def _serve(upstream_port: int, schedules: list[Schedule], control: Connection) -> None:
    with suppress(EOFError):
        asyncio.run(_Proxy(upstream_port, schedules, control).run())


class _Proxy:
    def __init__(self, upstream_port: int, schedules: list[Schedule], control: Connection) -> None:
        self._upstream_port = upstream_port
        self._schedules = schedules
        self._control = control
        self._started_at = float("inf")
        self._free_at = [0.0] * len(schedules)
        self._ended = asyncio.Event()

    async def run(self) -> None:
        servers = []
        for link in range(len(self._schedules)):
            servers.append(await asyncio.start_server(self._handler(link), "127.0.0.1", 0))
        self._control.send([server.sockets[0].getsockname()[1] for server in servers])
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._told)
        await self._ended.wait()

    def _told(self) -> None:
        try:
            self._started_at, self._schedules = self._control.recv()
        except EOFError:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._ended.set()

    def _handler(self, link: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
            ways = asyncio.gather(
                self._pass(reader, up_writer, None),
                self._pass(up_reader, writer, link),
                return_exceptions=True,
            )
            await ways

        return handle

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: int | None
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                if link is not None:
                    await self._turn(link, len(data))
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _turn(self, link: int, size_bytes: int) -> None:
        """The link is busy with one chunk at a time; this process may come a little late for the next."""
        now = time.monotonic()
        rate_bps = self._schedules[link].rate_bps(now - self._started_at)
        self._free_at[link] = max(now - _LATE_S, self._free_at[link]) + size_bytes / rate_bps
        await asyncio.sleep(self._free_at[link] - now)
