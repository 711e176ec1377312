"""A daemon's life: take its directory, start, say ready, serve, stop on SIGTERM or SIGINT."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import anyio
import structlog

from forebay.core import recent
from forebay.core.errors import AlreadyRunning, ForebayError
from forebay.core.redact import redact_all
from forebay.core.systemd import notify, stay_alive

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
            _without_secrets,
            recent.keep,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )


def _without_secrets(
    logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    return {key: redact_all(value) for key, value in event.items()}


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


@contextmanager
def own_directories(*paths: Path) -> Iterator[None]:
    """All of them, or AlreadyRunning. A disk that fails has nobody else on it either."""
    with ExitStack() as stack:
        for path in paths:
            try:
                stack.enter_context(own_directory(path))
            except OSError as err:
                log.warning("directory cannot be taken", path=str(path), error=str(err))
        yield


def run(
    name: str,
    main: Callable[[], Awaitable[None]],
    *,
    drain: Callable[[], Awaitable[None]] | None = None,
    reload: Callable[[], None] | None = None,
) -> None:
    """Run `main` until it ends or SIGTERM or SIGINT asks it to.

    `drain` comes first then, and has to end by itself; a second signal cuts it short. `reload` answers
    SIGHUP.
    """
    configure_logging()
    structlog.contextvars.bind_contextvars(daemon=name)
    # What was imported stays: collections that walk it would stop all answers for tens of milliseconds.
    gc.freeze()
    anyio.run(partial(_until_signal, main, drain, reload), backend_options={"use_uvloop": True})


async def _until_signal(
    main: Callable[[], Awaitable[None]],
    drain: Callable[[], Awaitable[None]] | None,
    reload: Callable[[], None] | None,
) -> None:
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if reload else (signal.SIGTERM, signal.SIGINT)
    with anyio.open_signal_receiver(*handled) as signals:
        async with anyio.create_task_group() as tasks:

            async def work() -> None:
                await main()
                tasks.cancel_scope.cancel()

            async def end() -> None:
                if drain:
                    await drain()
                tasks.cancel_scope.cancel()

            stopping = False
            tasks.start_soon(work)
            tasks.start_soon(stay_alive)
            async for signum in signals:
                if signum == signal.SIGHUP and reload:
                    _reload(reload)
                    continue
                log.info("stopping", signal=signal.Signals(signum).name)
                notify("STOPPING=1")
                if stopping or not drain:
                    break
                stopping = True
                tasks.start_soon(end)
            tasks.cancel_scope.cancel()


def _reload(reload: Callable[[], None]) -> None:
    """A mistake in the new settings leaves the old ones in force."""
    notify("RELOADING=1")
    try:
        reload()
    except ForebayError as err:
        log.error("not reloaded, the old settings stay", error=str(err))
    notify("READY=1")
