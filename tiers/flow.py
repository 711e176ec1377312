"""How hard one source may be asked: a window of requests that adapts, a rate, a pause when it says so.

Additive increase, multiplicative decrease (D.-M. Chiu, R. Jain, "Analysis of the increase and
decrease algorithms for congestion avoidance in computer networks", Computer Networks and ISDN
Systems 17, 1989), with TCP's slow start below the last good window, so that full rate is back within
seconds after a limit lifts; and, as TCP Vegas does, no growth while latency says that requests queue.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio

from forebay.core import metrics
from forebay.core.errors import ForebayError, StoreBusy, StoreUnreachable, root_cause
from forebay.tiers.budget import Class, TokenBucket

T = TypeVar("T")

# Objects that share a slow link all come late: the first one goes alone, and tells how long that takes.
_FIRST_WINDOW = 1.0
# Large ones take twice as long beside another one only when the link is full; small ones vary by themselves.
_FILLED, _LARGE_BYTES = 1.5, 1 << 20
_LEAST_RANGES = 2
_LONGEST_PAUSE_S = 5.0
_QUEUEING = 4.0
_SHRINKING = 8.0
_LEAST_VEGAS_WINDOW = 4.0
_SAMPLES = 200
_ENOUGH_SAMPLES = 20
_LEAST_HEDGE_S = 0.25
_HEDGE_SHARE = 0.05
# Ranks that waited a moment ago will wait again.
_URGENT_S = 1.0
_GAP_S = 0.02
_PROGRESS_S = 0.1


class _Latency:
    """Of requests of about one size."""

    def __init__(self) -> None:
        self.recent_s: deque[float] = deque(maxlen=_SAMPLES)
        self.smooth_s = 0.0
        self.base_s = math.inf

    def add(self, latency_s: float) -> None:
        self.recent_s.append(latency_s)
        self.smooth_s += (latency_s - self.smooth_s) / min(len(self.recent_s), 8)
        # The floor rises slowly, so that a path that became longer is believed in the end.
        self.base_s = min(latency_s, self.base_s * 1.001)

    def p95_s(self) -> float:
        if len(self.recent_s) < _ENOUGH_SAMPLES:
            return math.inf
        return sorted(self.recent_s)[int(len(self.recent_s) * 0.95)]


class Preempted(Exception):
    """Broken off for something stronger; to be asked for again."""


class Flow:
    """One source. Methods run on the daemon's event loop; its turns are given out by `tiers.budget.Gate`."""

    def __init__(self, name: str, most: int, rate_bps: float = 0.0) -> None:
        self.name = name
        self.most = most
        self.rate = TokenBucket(rate_bps)
        self.window = min(_FIRST_WINDOW, most)
        self.throttled = 0
        self.hedged = 0
        self._threshold = float(most)
        self._total = 0
        # Demands and restores in line or on their way; of what can wait, requests on their way.
        self._urgent = self._patient = 0
        self._urgent_until = self._patient_at = 0.0
        self._preemptible: list[anyio.CancelScope] = []
        self._requests = self._in_ranges = 0
        self._paused_until = 0.0
        self._pause_s = 0.0
        self._cut_at = 0.0
        self._latency: defaultdict[int, _Latency] = defaultdict(_Latency)

    # A lane of the gate

    def opens_in_s(self, cls: Class) -> float:
        if (pause_s := self._paused_until - time.monotonic()) > 0:
            return pause_s
        if self._total >= max(1, int(self.window)):
            return math.inf
        if cls >= Class.DRAIN and (pause_s := self._yields_s()):
            return pause_s
        return self.rate.opens_in_s()

    def began(self, cls: Class, size_bytes: int) -> None:
        self._total += 1
        self._requests += 1
        self.rate.take(size_bytes)
        if cls <= Class.RESTORE:
            self._urgent += 1
        if cls >= Class.DRAIN:
            self._patient += 1
            self._patient_at = time.monotonic()

    def ended(self, cls: Class) -> None:
        self._total -= 1
        self._patient -= cls >= Class.DRAIN
        if cls <= Class.RESTORE:
            self._urgent -= 1
            self._urgent_until = time.monotonic() + _URGENT_S

    def waiting(self, cls: Class, change: int) -> None:
        if cls <= Class.RESTORE:
            self._urgent += change
            if change > 0:
                for scope in self._preemptible[1:]:
                    scope.cancel()

    async def preemptibly(self, call: Callable[[], Awaitable[T]]) -> T:
        """For what can wait: when a rank comes to wait, all such requests but one are broken off.

        Raises Preempted then.
        """
        with anyio.CancelScope() as scope:
            self._preemptible.append(scope)
            try:
                return await call()
            finally:
                self._preemptible.remove(scope)
        raise Preempted

    @contextmanager
    def in_ranges(self) -> Iterator[Callable[[Class], int]]:
        """For an object that comes in ranges: how many at once, when all that do share the window.

        What a rank waits for shares with nobody.
        """
        self._in_ranges += 1
        try:
            yield lambda cls: max(
                _LEAST_RANGES, int(self.window / (1 if cls <= Class.RESTORE else self._in_ranges))
            )
        finally:
            self._in_ranges -= 1

    def _yields_s(self) -> float:
        """What can wait goes one by one while ranks wait for this source, in their gaps, but goes on."""
        now = time.monotonic()
        if not self._urgent and now >= self._urgent_until:
            return 0.0
        if self._patient:
            return math.inf
        gap_s = _GAP_S if self._urgent else self._urgent_until - _URGENT_S + _GAP_S - now
        return max(0.0, min(gap_s, self._patient_at + _PROGRESS_S - now))

    # What requests tell

    async def observed(self, call: Callable[[], Awaitable[T]], size_bytes: int) -> T:
        """Run one request and learn from it."""
        began_at = time.monotonic()
        try:
            result = await call()
        except (StoreBusy, StoreUnreachable) as err:
            self._cut(began_at, err.retry_after_s if isinstance(err, StoreBusy) else None)
            raise
        self._grown(time.monotonic() - began_at, size_bytes)
        return result

    async def hedged_call(self, call: Callable[[], Awaitable[T]], size_bytes: int) -> T:
        """As `observed`, and past the source's p95 a second time beside it: the first answer counts."""
        wait_s = max(self._latency[_size_class(size_bytes)].p95_s() * 1.5, _LEAST_HEDGE_S)
        if wait_s == math.inf:
            return await self.observed(call, size_bytes)
        answers: list[T] = []
        try:
            async with anyio.create_task_group() as tasks:

                async def one(delay_s: float) -> None:
                    await anyio.sleep(delay_s)
                    if delay_s:
                        if not self._may_hedge():
                            return
                        self.hedged += 1
                        metrics.transfer_hedges.inc()
                    answers.append(await self.observed(call, size_bytes))
                    tasks.cancel_scope.cancel()

                tasks.start_soon(one, 0.0)
                tasks.start_soon(one, wait_s)
        except* ForebayError as errors:
            raise root_cause(errors) from None
        return answers[0]

    def _may_hedge(self) -> bool:
        return (
            self.hedged < max(1, self._requests * _HEDGE_SHARE)
            and self._total < self.window
            and time.monotonic() >= self._paused_until
        )

    def _grown(self, latency_s: float, size_bytes: int) -> None:
        latency = self._latency[_size_class(size_bytes)]
        latency.add(latency_s)
        self._pause_s = 0.0
        queueing = latency.smooth_s / latency.base_s
        if queueing > (_FILLED if size_bytes >= _LARGE_BYTES else _QUEUEING):
            self._threshold = min(self._threshold, self.window)
        if queueing > _SHRINKING and self.window > _LEAST_VEGAS_WINDOW:
            self.window -= 1 / self.window
        elif queueing <= _QUEUEING and self._total >= self.window - 1:
            step = 1.0 if self.window < self._threshold else 1 / self.window
            self.window = min(self.window + step, float(self.most))

    def _cut(self, began_at: float, retry_after_s: float | None) -> None:
        """Once for all requests that were on their way together."""
        self.throttled += 1
        metrics.transfer_throttled.inc()
        now = time.monotonic()
        if began_at > self._cut_at:
            self._cut_at = now
            self._threshold = max(1.0, self.window * 0.75)
            self.window = max(1.0, self.window / 2)
            self._pause_s = min(max(self._pause_s * 2, 0.05), _LONGEST_PAUSE_S)
        pause_s = retry_after_s if retry_after_s is not None else random.uniform(0, self._pause_s)
        self._paused_until = max(self._paused_until, now + pause_s)


def _size_class(size_bytes: int) -> int:
    return size_bytes.bit_length() // 2


class Open:
    """A lane without limits of its own: what only shares the gate's budget and rate."""

    def opens_in_s(self, cls: Class) -> float:
        return 0.0

    def began(self, cls: Class, size_bytes: int) -> None:
        return

    def ended(self, cls: Class) -> None:
        return

    def waiting(self, cls: Class, change: int) -> None:
        return
