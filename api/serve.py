"""`forebay serve` and `forebay up`: the processes of a node."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import anyio
import structlog
from anyio.abc import Process

from forebay.core import service
from forebay.core.config import Settings
from forebay.core.errors import ConfigError

log = structlog.get_logger()

Part = Literal["stager", "checkpoint", "api"]
PARTS: tuple[Part, ...] = ("stager", "checkpoint", "api")

_START_S = 30.0
# Longer than a daemon takes to bring what is in memory to the disk (checkpoint.drain_s).
_STOP_S = 40.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_STEADY_S = 10.0
_PR_SET_PDEATHSIG = 1


def serve(part: Part, settings: Settings) -> None:
    """Run one daemon in this process until a signal ends it."""
    name = f"forebay-{part}"
    # Imported here: a daemon loads its own code only.
    if part == "stager":
        from forebay.stager.daemon import Stagerd

        stagerd = Stagerd(settings)
        service.run(name, stagerd.main, drain=stagerd.drain, reload=stagerd.reload)
    elif part == "checkpoint":
        from forebay.checkpointd.daemon import Checkpointd

        checkpointd = Checkpointd(settings)
        service.run(name, checkpointd.main, drain=checkpointd.drain)
    else:
        from forebay.api.server import ApiServer

        server = ApiServer(settings)
        service.run(name, server.main, drain=server.drain)


def end_with_parent() -> None:
    """SIGTERM for this process when its parent dies, however it dies (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        raise SystemExit(0)


async def up(ready: Callable[[], None]) -> None:
    """All three under this process; one that dies is started again. `ready` is called once."""
    with tempfile.TemporaryDirectory(prefix="forebay-up-") as folder:
        async with anyio.create_task_group() as tasks:
            for part in PARTS:
                await tasks.start(_keep, part, Path(folder))
            ready()


async def _keep(part: Part, folder: Path, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    """Start, wait, start again: with a growing pause while it keeps dying at once."""
    address = folder / part
    pause_s = _FIRST_PAUSE_S
    announced = False
    async with await anyio.create_unix_datagram_socket(local_path=address) as inbox:
        while True:
            began_at = anyio.current_time()
            process = await anyio.open_process(
                [sys.executable, "-m", "forebay.api.cli", "serve", part, "--with-parent"],
                stdin=None,
                stdout=None,
                stderr=None,
                env={**os.environ, "NOTIFY_SOCKET": str(address)},
            )
            try:
                if not announced:
                    await _started(part, process, inbox)
                    task_status.started()
                    announced = True
                await process.wait()
            except BaseException:
                await _stop(process)
                raise
            log.warning("a daemon ended, starting it again", part=part, status=process.returncode)
            pause_s = (
                _FIRST_PAUSE_S
                if anyio.current_time() - began_at > _STEADY_S
                else min(2 * pause_s, _LONGEST_PAUSE_S)
            )
            await anyio.sleep(pause_s)


async def _started(part: Part, process: Process, inbox: anyio.abc.UNIXDatagramSocket) -> None:
    """Wait for READY=1. Raises ConfigError when the process ends first."""
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            status = await process.wait()
            raise ConfigError(
                f"forebay {part} did not start (exit status {status})", hint="its own message is above"
            )

        tasks.start_soon(watch)
        with anyio.fail_after(_START_S):
            await inbox.receive()
        tasks.cancel_scope.cancel()


async def _stop(process: Process) -> None:
    with anyio.CancelScope(shield=True):
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with anyio.move_on_after(_STOP_S):
            await process.wait()
            return
        process.kill()
        await process.wait()
