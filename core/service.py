"""A daemon's life: take its directory, start, say ready, serve, stop on SIGTERM or SIGINT."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import structlog

from forebay.core.errors import AlreadyRunning

log = structlog.get_logger()


def boot_id() -> str:
    """Changes with each boot of the machine (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def configure_logging() -> None:
    """Human lines on a terminal, JSON elsewhere; always stderr, so that results own stdout."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )


@contextmanager
def own_directory(path: Path) -> Iterator[None]:
    """Hold `path` for this process alone; the kernel lets go when it dies, however it dies.

    Raises AlreadyRunning.
    """
    path.mkdir(parents=True, exist_ok=True)
    fd = os.open(path / ".forebay.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise AlreadyRunning(
                f"{path} belongs to another running daemon", hint="stop that one, or set another directory"
            ) from err
        yield
    finally:
        os.close(fd)


def notify(state: str) -> None:
    """Tell systemd, when it asked to be told (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


def run(name: str, main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` until it ends or a signal asks it to."""
    configure_logging()
    structlog.contextvars.bind_contextvars(daemon=name)
    anyio.run(_until_signal, name, main, backend_options={"use_uvloop": True})


async def _until_signal(name: str, main: Callable[[], Awaitable[None]]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks:

            async def work() -> None:
                await main()
                tasks.cancel_scope.cancel()

            tasks.start_soon(work)
            async for signum in signals:
                log.info("stopping", signal=signal.Signals(signum).name)
                notify("STOPPING=1")
                tasks.cancel_scope.cancel()
                break
