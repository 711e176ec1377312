"""What the reports of all ranks mean together: who waits, for what, and whether storage can keep up."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from forebay.core.protocol import LONGEST_RUNWAY_S
from forebay.core.units import format_bytes
from forebay.loaders.pacing.report import RankReport

# Shares of a step.
_SKEW_IS_WORTH_A_WORD = 0.01
_BOUND_SHARE = 0.05
# A node is rich with so much more runway than the poorest, and gives way down to what it needs itself.
_RICH_S, _RICH_TIMES, _KEEP_S = 5.0, 4.0, 5.0


class Lockstep(msgspec.Struct, frozen=True):
    """All ranks at one look.

    wait_share: of the time of a step that goes to waiting for data, mean of the ranks.
    skew_p50_s, skew_p99_s: longest wait minus shortest of one step, over the last steps; skew_share:
        the p99 as a share of a step.
    slowest: rank and node that waited longest; runway_s: the shortest, and whose.
    needs_bps, has_bps: what the ranks would consume without waiting, and what they got.
    alarms: ranks that wait too long right now, in words. keep_bytes: of nodes that are to give way.
    """

    step: int = 0
    ranks: int = 0
    step_s: float = 0.0
    wait_share: float = 0.0
    skew_p50_s: float = 0.0
    skew_p99_s: float = 0.0
    skew_share: float = 0.0
    slowest: str = ""
    runway_s: float = 0.0
    poorest: str = ""
    needs_bps: float = 0.0
    has_bps: float = 0.0
    storage_bound: bool = False
    alarms: list[str] = []
    keep_bytes: dict[str, int] = {}

    def line(self) -> str:
        """For the log, once a minute."""
        short = self.runway_s < LONGEST_RUNWAY_S
        runway = f"least runway {self.runway_s:.1f} s ({self.poorest})" if short else "all ahead is here"
        said = (
            f"step {self.step}: {self.ranks} ranks wait {self.wait_share:.1%} of a step of "
            f"{self.step_s * 1e3:.0f} ms; skew p99 {self.skew_p99_s * 1e3:.0f} ms; {runway}"
        )
        if self.skew_share > _SKEW_IS_WORTH_A_WORD:
            said += f"; {self.slowest} is slowest"
        if self.storage_bound:
            said += (
                f"; storage-bound: needs {format_bytes(self.needs_bps)}/s, has {format_bytes(self.has_bps)}/s"
            )
        return said

    @property
    def worth_a_warning(self) -> bool:
        return self.storage_bound or self.skew_share > _SKEW_IS_WORTH_A_WORD


def judge(
    now: Sequence[RankReport], before: Sequence[RankReport], seconds: float, alarm_s: float
) -> Lockstep:
    """Reports of now and of `seconds` ago. A rank that waits longer than `alarm_s` is an alarm."""
    if not now:
        return Lockstep()
    since = {report.rank: report for report in before}
    spans = [(report, since[report.rank]) for report in now if report.rank in since]
    waited_s = sum(new.wait_s - old.wait_s for new, old in spans)
    busy_s = sum(new.busy_s - old.busy_s for new, old in spans)
    steps = sum(new.step - old.step for new, old in spans)
    wait_share = waited_s / (waited_s + busy_s) if waited_s + busy_s > 0 else 0.0
    step_s = (waited_s + busy_s) / steps if steps else 0.0
    skews = skews_of(now)
    p99_s = _quantile(skews, 0.99)
    poorest = min(now, key=lambda report: report.runway_s)
    slowest = max(now, key=lambda report: report.wait_s)
    by_storage = sum(_waits_for_storage(new) for new, _ in spans)
    return Lockstep(
        step=min(report.step for report in now),
        ranks=len(now),
        step_s=step_s,
        wait_share=wait_share,
        skew_p50_s=_quantile(skews, 0.5),
        skew_p99_s=p99_s,
        skew_share=p99_s / step_s if step_s else 0.0,
        slowest=_who(slowest),
        runway_s=poorest.runway_s,
        poorest=_who(poorest),
        needs_bps=sum(report.demand_bps for report in now),
        has_bps=sum(new.bytes - old.bytes for new, old in spans) / seconds if seconds else 0.0,
        storage_bound=wait_share > _BOUND_SHARE and by_storage * 2 >= len(spans) > 0,
        alarms=[alarm_of(report) for report in now if report.waiting_s >= alarm_s],
        keep_bytes=_who_gives_way(now),
    )


def skews_of(reports: Sequence[RankReport]) -> list[float]:
    """Longest wait minus shortest, of each step that all ranks have told of."""
    waits = []
    for report in reports:
        first = report.step - len(report.waits_s) + 1
        waits.append({first + place: wait_s for place, wait_s in enumerate(report.waits_s)})
    common = set.intersection(*(set(known) for known in waits)) if waits else set()
    return [
        max(known[step] for known in waits) - min(known[step] for known in waits) for step in sorted(common)
    ]


def _waits_for_storage(report: RankReport) -> bool:
    """Short of runway, or waiting for a shard: decoding that is slow leaves the runway long."""
    return report.cause == "storage" or report.runway_s < 1.0


def alarm_of(report: RankReport) -> str:
    cause = {
        "storage": f"storage: {report.shard or 'a shard'} is not here yet ({report.tier or 'its source'})",
        "decoding": "decoding: the samples are here, cutting or decoding them takes long",
        "network": "network: stagerd of its node does not answer",
    }.get(report.cause, "an unknown cause")
    return f"{_who(report)} has waited {report.waiting_s:.0f} s for step {report.step + 1}: {cause}"


def _who(report: RankReport) -> str:
    return f"rank {report.rank} on {report.node}"


def _who_gives_way(reports: Sequence[RankReport]) -> dict[str, int]:
    """Nodes whose poorest rank is rich beside the poorest of all fetch no further than they need soon."""
    runway_s: dict[str, float] = {}
    demand_bps: dict[str, float] = defaultdict(float)
    for report in reports:
        runway_s[report.node] = min(runway_s.get(report.node, report.runway_s), report.runway_s)
        demand_bps[report.node] += report.demand_bps
    least_s = min(runway_s.values())
    rich = [node for node, s in runway_s.items() if s > max(_RICH_S, _RICH_TIMES * least_s)]
    if least_s > _RICH_S:
        return {}
    return {node: int(demand_bps[node] * _KEEP_S) for node in rich}


def _quantile(values: Sequence[float], share: float) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]
