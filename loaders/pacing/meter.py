"""What this rank does at each step: how long it waits for its batch, how long it works on it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_KEPT = 256
# The first waits include starting up, the first steps compiling: they say nothing about pace.
_SMOOTHING = 0.05


@dataclass(frozen=True)
class Measured:
    """`waits_s` of the last steps; `waiting_s` of the one under way."""

    step: int
    wait_s: float
    busy_s: float
    bytes: int
    demand_bps: float
    waiting_s: float
    waits_s: list[float]


class StepMeter:
    """Fed by the loader as batches are asked for and handed over; read by the monitor's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._step = 0
        self._wait_s = self._busy_s = 0.0
        self._bytes = 0
        self._batch_bytes = self._batch_busy_s = 0.0
        self._waits = deque[float](maxlen=_KEPT)
        self._asked_at: float | None = None
        self._given_at: float | None = None

    def asked(self) -> None:
        """A batch is wanted now."""
        with self._lock:
            now = self._clock()
            self._asked_at = now
            if self._given_at is not None:
                busy_s = now - self._given_at
                self._busy_s += busy_s
                self._batch_busy_s = _smooth(self._batch_busy_s, busy_s)

    def given(self, size_bytes: int) -> float:
        """It is there; how long that took, in seconds."""
        with self._lock:
            now = self._clock()
            wait_s = now - (self._asked_at if self._asked_at is not None else now)
            self._asked_at, self._given_at = None, now
            self._step += 1
            self._wait_s += wait_s
            self._waits.append(wait_s)
            self._bytes += size_bytes
            self._batch_bytes = _smooth(self._batch_bytes, size_bytes)
            return wait_s

    def stopped(self) -> None:
        """Nobody asks for the next batch yet: what comes now is no step."""
        with self._lock:
            self._asked_at = self._given_at = None

    def measured(self) -> Measured:
        with self._lock:
            waiting_s = 0.0 if self._asked_at is None else self._clock() - self._asked_at
            demand_bps = self._batch_bytes / self._batch_busy_s if self._batch_busy_s > 0 else 0.0
            return Measured(
                self._step, self._wait_s, self._busy_s, self._bytes, demand_bps, waiting_s, list(self._waits)
            )


def _smooth(before: float, new: float) -> float:
    return new if not before else before + _SMOOTHING * (new - before)
