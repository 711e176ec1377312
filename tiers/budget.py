"""Who may move how many bytes when: classes, deadlines, one budget of bytes in flight, token buckets.

Every request for bytes takes its turn at one `Gate` per daemon. Turns go by class, then by rank: a
stage job's next range starts only after every demand that waits, so it never delays one by more
than the ranges already on their way.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import anyio


class Class(IntEnum):
    """Strongest first."""

    DEMAND = 0
    RESTORE = 1
    LOOKAHEAD = 2
    DRAIN = 3
    BULK = 4
    SCRUB = 5


@dataclass(eq=False)
class Ticket:
    """How urgent a piece of work is; may be raised while it waits. A lower rank goes first in a class."""

    cls: Class
    rank: float = 0.0
    # Set when it comes into a stronger class, for who waits elsewhere than at the gate.
    raised: anyio.Event = field(default_factory=anyio.Event)

    def raise_to(self, cls: Class, rank: float) -> None:
        if cls < self.cls:
            self.raised.set()
            self.raised = anyio.Event()
        self.cls, self.rank = min((self.cls, self.rank), (cls, rank))


class Lane(Protocol):
    """What else must agree before a turn begins: a source with its own limits (tiers.flow)."""

    def opens_in_s(self, cls: Class) -> float:
        """0 when a request of that class may start now, inf when only an end of another can tell."""

    def began(self, cls: Class, size_bytes: int) -> None:
        """A request has been let in."""

    def ended(self, cls: Class) -> None:
        """It has been answered, well or not."""

    def waiting(self, cls: Class, change: int) -> None:
        """One more or one less stands in line."""


class TokenBucket:
    """At most `rate_bps` bytes per second on average. A request may run into debt, the next one waits."""

    _BURST_S = 0.1

    def __init__(self, rate_bps: float) -> None:
        self.rate_bps = rate_bps
        self._tokens = 0.0
        self._at = time.monotonic()

    def opens_in_s(self) -> float:
        if not self.rate_bps:
            return 0.0
        now = time.monotonic()
        self._tokens = min(self._tokens + (now - self._at) * self.rate_bps, self._BURST_S * self.rate_bps)
        self._at = now
        return max(0.0, -self._tokens / self.rate_bps)

    def take(self, size_bytes: int) -> None:
        self._tokens -= size_bytes


@dataclass(eq=False)
class Turn:
    """A request that waits for its turn, and then has it."""

    ticket: Ticket
    lane: Lane
    size_bytes: int
    granted: bool = False
    # Set when it is granted, or when the time until then has to be looked at anew.
    called: anyio.Event = field(default_factory=anyio.Event)
    # As it was when the turn began: the ticket may be raised later.
    cls: Class = Class.SCRUB
    in_lane: bool = False

    def enter(self) -> None:
        self.cls, self.in_lane = self.ticket.cls, True
        self.lane.began(self.cls, self.size_bytes)
        self.granted = True
        self.called.set()

    def leave_lane(self) -> None:
        """The source has answered; the bytes are still in memory."""
        if self.in_lane:
            self.in_lane = False
            self.lane.ended(self.cls)


class Gate:
    """At most `limit_bytes` on their way at once; a single larger request gets through alone."""

    def __init__(self, limit_bytes: int, rate_bps: float = 0.0) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self._turns = 0
        self.rate = TokenBucket(rate_bps)
        self._waiting: list[Turn] = []
        self._closed = False
        self._idle = anyio.Event()

    def configure(self, limit_bytes: int, rate_bps: float) -> None:
        self.limit_bytes = limit_bytes
        self.rate.rate_bps = rate_bps
        self.dispatch()

    async def close(self, limit_s: float) -> None:
        """No more turns; returns when those that were given have ended, or after the time."""
        self._closed = True
        if self._turns:
            with anyio.move_on_after(limit_s):
                await self._idle.wait()

    @asynccontextmanager
    async def turn(self, lane: Lane, ticket: Ticket, size_bytes: int) -> AsyncIterator[Turn]:
        """Wait for it, hold it while the block runs."""
        turn = Turn(ticket, lane, size_bytes)
        try:
            await self._granted(turn)
            yield turn
        finally:
            if turn.granted:
                self.taken_bytes -= size_bytes
                self._turns -= 1
                if not self._turns:
                    self._idle.set()
            turn.leave_lane()
            self.dispatch()

    async def _granted(self, turn: Turn) -> None:
        cls = turn.ticket.cls
        self._waiting.append(turn)
        turn.lane.waiting(cls, +1)
        try:
            opens_in_s = self._start_all()
            if turn.granted:
                self._pass_on(opens_in_s)
            while not turn.granted:
                with anyio.move_on_after(opens_in_s):
                    await turn.called.wait()
                if not turn.granted:
                    turn.called = anyio.Event()
                    opens_in_s = self._start_all()
                    if turn.granted:
                        self._pass_on(opens_in_s)
        finally:
            turn.lane.waiting(cls, -1)
            if turn in self._waiting:
                self._waiting.remove(turn)

    def answered(self, turn: Turn) -> None:
        """Its source has answered: another may ask there, while these bytes are still in memory."""
        turn.leave_lane()
        self.dispatch()

    def dispatch(self) -> None:
        """Start what may start: a turn has ended, a ticket was raised, a limit has changed."""
        self._pass_on(self._start_all())

    def _pass_on(self, opens_in_s: float) -> None:
        """Somebody who still waits has to look at the clock."""
        if opens_in_s < math.inf and self._waiting:
            self._waiting[0].called.set()

    def _start_all(self) -> float:
        """Seconds until it is worth asking again, inf when the end of another turn will tell."""
        soonest = math.inf
        if self._closed:
            return soonest
        for turn in sorted(self._waiting, key=lambda t: (t.ticket.cls, t.ticket.rank)):
            if self.taken_bytes and self.taken_bytes + turn.size_bytes > self.limit_bytes:
                break
            opens_in_s = max(self.rate.opens_in_s(), turn.lane.opens_in_s(turn.ticket.cls))
            if opens_in_s:
                soonest = min(soonest, opens_in_s)
                continue
            self._waiting.remove(turn)
            self.taken_bytes += turn.size_bytes
            self._turns += 1
            self.rate.take(turn.size_bytes)
            turn.enter()
        return soonest
