"""How fast a session consumes while it does not wait: what its deadlines are counted by."""

from __future__ import annotations

import time
from collections.abc import Callable

_UNKNOWN_BPS = 200e6
_SMOOTHING = 0.3
_LEAST_S = 1e-3


class DemandMeter:
    """Fed with what a session passes in its plan and how long it waited for shards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at: float | None = None
        self._waited_s = 0.0
        self.rate_bps = _UNKNOWN_BPS

    def waited(self, wait_s: float) -> None:
        self._waited_s += wait_s

    def passed(self, size_bytes: int) -> None:
        now = self._clock()
        if self._at is not None and size_bytes:
            busy_s = max(now - self._at - self._waited_s, _LEAST_S)
            self.rate_bps += _SMOOTHING * (size_bytes / busy_s - self.rate_bps)
        self._at, self._waited_s = now, 0.0
