"""The thread beside the training that measures, tells, and gives way. It never blocks a step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from forebay.core.config import Settings
from forebay.core.errors import ForebayError, InvalidRequest
from forebay.core.protocol import LONGEST_RUNWAY_S, RankState, Runway
from forebay.loaders.pacing.board import Board, job_store
from forebay.loaders.pacing.lockstep import Lockstep, alarm_of, judge
from forebay.loaders.pacing.meter import StepMeter
from forebay.loaders.pacing.report import Cause, RankReport

log = logging.getLogger("forebay.loaders")

_NCCL_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Pacing:
    """How a job is watched.

    interval_s: between two looks; line_s: between two lines in the first rank's log.
    alarm_s: a rank that waits longer is an alarm; a third of the process group's timeout by default.
    gate_s: the first step waits until every rank has `runway_s` of data ahead, but no longer than this.
    give_way: nodes with much runway leave the source to those with little.
    """

    interval_s: float = 1.0
    line_s: float = 60.0
    alarm_s: float | None = None
    gate_s: float = 0.0
    runway_s: float = 2.0
    give_way: bool = True

    def __post_init__(self) -> None:
        if self.interval_s <= 0 or self.line_s <= 0 or self.gate_s < 0 or (self.alarm_s or 1) <= 0:
            raise InvalidRequest(f"{self}: times are above 0", hint="gate_s may be 0")


@dataclass(frozen=True)
class Held:
    """What the batch that is next waits for."""

    cause: Cause = ""
    shard: str = ""


@dataclass(frozen=True)
class Place:
    """`job` is the same on all ranks that read together."""

    job: str
    rank: int
    world_size: int


class Fed(Protocol):
    """Where batches come from."""

    def held(self) -> Held: ...

    def pace(self, keep_bytes: int | None, state: RankState | None = None) -> Runway: ...


class Monitor:
    """Of one pass over a loader; a context manager, entered when the gate opens. Its thread ends with it."""

    def __init__(
        self,
        pacing: Pacing,
        meter: StepMeter,
        fed: Fed,
        place: Place,
        looked: Callable[[Lockstep], None],
    ) -> None:
        self._pacing = pacing
        self._meter = meter
        self._fed = fed
        self._job, self._rank, self._world_size = place.job, place.rank, place.world_size
        self._looked = looked
        self._node = Settings.load().node
        self._stop = threading.Event()
        self._board: Board | None = None
        self._alarm_s = pacing.alarm_s or _NCCL_TIMEOUT_S / 3
        self._before: tuple[float, list[RankReport]] = (time.monotonic(), [])
        self._line_at = time.monotonic() + pacing.line_s
        self._alarmed = ""
        self._warned = False
        self.lockstep = Lockstep()
        # As of the last look; stagerd shows it.
        self._state: RankState | None = None
        self._thread = threading.Thread(target=self._run, name="forebay-pace", daemon=True)

    def __enter__(self) -> Monitor:
        if (found := job_store()) and self._world_size == found.world_size:
            self._board = Board(found.store, self._job, self._world_size)
            if self._pacing.alarm_s is None:
                self._alarm_s = found.timeout_s / 3
        self._gate()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _gate(self) -> None:
        """Until all ranks have runway, or the time is up, which is said."""
        if not self._pacing.gate_s:
            return
        deadline = time.monotonic() + self._pacing.gate_s
        while time.monotonic() < deadline:
            runway = self._runway(None)
            if runway is None or runway.ends or self._runway_s(runway) >= self._pacing.runway_s:
                break
            self._stop.wait(min(self._pacing.interval_s, 0.1))
        if self._board and not self._board.all_ready(self._rank, max(0.1, deadline - time.monotonic())):
            log.warning("not every rank has runway after %g s; starting all the same", self._pacing.gate_s)

    def _run(self) -> None:
        while not self._stop.wait(self._pacing.interval_s):
            try:
                self._look()
            except RuntimeError as err:
                # A store that went with its job: the training goes on without it.
                self._warn(err)

    def _look(self) -> None:
        keep_bytes = self.lockstep.keep_bytes.get(self._node) if self._pacing.give_way else None
        report = self._report(self._runway(keep_bytes))
        self._state = RankState(
            report.rank, report.step, report.wait_s, report.busy_s, report.waiting_s, report.runway_s,
            self.lockstep.skew_share, self.lockstep.storage_bound,
        )  # fmt: skip
        if report.waiting_s >= self._alarm_s:
            self._alarm([alarm_of(report)])
        if self._board:
            self._board.post(report)
        if self._board and self._rank > 0:
            self.lockstep = self._board.announced() or self.lockstep
            self._looked(self.lockstep)
            return
        self._judge(self._board.reports() if self._board else [report])

    def _runway(self, keep_bytes: int | None) -> Runway | None:
        """None when stagerd does not answer: what the rank itself knows is told all the same."""
        try:
            return self._fed.pace(keep_bytes, self._state)
        except ForebayError as err:
            self._warn(err)
            return None

    def _warn(self, err: Exception) -> None:
        if not self._warned:
            log.warning("pacing: %s", err)
        self._warned = True

    def _judge(self, now: list[RankReport]) -> None:
        at, before = self._before
        self.lockstep = judge(now, before, time.monotonic() - at, self._alarm_s)
        self._looked(self.lockstep)
        if self._board:
            self._board.announce(self.lockstep)
        self._alarm(self.lockstep.alarms)
        if time.monotonic() >= self._line_at:
            log.log(
                logging.WARNING if self.lockstep.worth_a_warning else logging.INFO, "%s", self.lockstep.line()
            )
            self._line_at = time.monotonic() + self._pacing.line_s
            self._before = time.monotonic(), now
        elif not before:
            self._before = time.monotonic(), now

    def _alarm(self, alarms: list[str]) -> None:
        """Each once, and not again for every second that it lasts."""
        for alarm in alarms:
            who = alarm.partition(" has waited")[0] + alarm.partition(" for step ")[2]
            if who != self._alarmed:
                self._alarmed = who
                log.error("%s", alarm)

    def _report(self, runway: Runway | None) -> RankReport:
        measured, held = self._meter.measured(), self._fed.held()
        waiting = measured.waiting_s > 0
        return RankReport(
            self._rank, self._node, measured.step, measured.wait_s, measured.busy_s, measured.bytes,
            measured.demand_bps,
            self._runway_s(runway) if runway else LONGEST_RUNWAY_S, measured.waiting_s,
            held.cause if waiting else "", (runway.shard if runway else "") or held.shard,
            runway.tier if runway else "", measured.waits_s,
        )  # fmt: skip

    def _runway_s(self, runway: Runway) -> float:
        """All ranks read the same shards, each its part of them."""
        demand_bps = self._meter.measured().demand_bps * self._world_size
        if runway.ends or not demand_bps:
            return LONGEST_RUNWAY_S
        return min(runway.ahead_bytes / demand_bps, LONGEST_RUNWAY_S)
