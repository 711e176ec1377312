"""Is a disk to be trusted: healthy, suspect, out, probing; with a way back.

One failure makes it suspect, more among the last operations take it out: what it holds is a miss
then, and nothing new goes there. While it is out it is probed, ever less often; two good probes in a
row bring it back.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import anyio
import structlog

log = structlog.get_logger()

State = Literal["healthy", "suspect", "out", "probing"]

_REMEMBERED = 20
_FAILURES_OUT = 3
_GOOD_PROBES = 2
_FIRST_PROBE_S = 1.0
_LAST_PROBE_S = 60.0
_PROBE_BYTES = 64 << 10


class Health:
    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self.state: State = "healthy"
        self.failures = 0
        self._clock = clock
        self._recent: deque[bool] = deque(maxlen=_REMEMBERED)
        self._good_probes = 0
        self._pause_s = _FIRST_PROBE_S
        self._probe_at = 0.0
        self._gone_out = anyio.Event()

    async def went_out(self) -> None:
        """Returns when the disk is out."""
        await self._gone_out.wait()

    @property
    def usable(self) -> bool:
        return self.state in ("healthy", "suspect")

    def ok(self) -> None:
        self._recent.append(True)
        if self.state == "suspect" and not list(self._recent).count(False):
            self._become("healthy", "")

    def failed(self, reason: str) -> None:
        self.failures += 1
        self._recent.append(False)
        if not self.usable:
            return
        if list(self._recent).count(False) >= _FAILURES_OUT:
            self._out(reason)
        else:
            self._become("suspect", reason)

    def next_probe_s(self) -> float:
        """Seconds until a probe is due; meaningful only while out."""
        return max(0.0, self._probe_at - self._clock())

    def probing(self) -> None:
        self._become("probing", "")

    def probed(self, problem: str | None) -> None:
        if problem is not None:
            self._good_probes = 0
            self._pause_s = min(self._pause_s * 2, _LAST_PROBE_S)
            self._out(problem)
            return
        self._good_probes += 1
        if self._good_probes < _GOOD_PROBES:
            self._out("one good probe")
        else:
            self._recent.clear()
            self._good_probes, self._pause_s = 0, _FIRST_PROBE_S
            self._gone_out = anyio.Event()
            self._become("healthy", "")

    def _out(self, reason: str) -> None:
        self._probe_at = self._clock() + self._pause_s
        self._gone_out.set()
        self._become("out", reason)

    def _become(self, state: State, reason: str) -> None:
        if state != self.state and "probing" not in (state, self.state):
            log.warning("hot disk", folder=str(self.folder), state=state, reason=reason)
        self.state = state


def probe(folder: Path) -> None:
    """Write, flush, read back, remove. Raises OSError."""
    path = folder / f".forebay-tmp-probe-{secrets.token_hex(4)}"
    data = os.urandom(_PROBE_BYTES)
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.read_bytes() != data:
            raise OSError("the disk gave other bytes back than it took")
    finally:
        path.unlink(missing_ok=True)
