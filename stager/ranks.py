"""What the ranks on this node tell of themselves, each second: for /metrics, while they live."""

from __future__ import annotations

from forebay.core import metrics
from forebay.core.protocol import RankState

_GAUGES = {
    "step": metrics.rank_step,
    "wait_s": metrics.rank_wait_seconds,
    "busy_s": metrics.rank_busy_seconds,
    "waiting_s": metrics.rank_waiting_seconds,
    "runway_s": metrics.rank_runway_seconds,
    "skew_share": metrics.rank_skew_share,
    "storage_bound": metrics.rank_storage_bound,
}


class RankGauges:
    """Of one session. Several loaders of a rank (training, validation) differ in their dataset."""

    def __init__(self) -> None:
        self._labels: set[tuple[str, str]] = set()

    def told(self, state: RankState, dataset: str) -> None:
        labels = str(state.rank), dataset
        self._labels.add(labels)
        for field, gauge in _GAUGES.items():
            gauge.labels(*labels).set(float(getattr(state, field)))

    def gone(self) -> None:
        for labels in self._labels:
            for gauge in _GAUGES.values():
                gauge.remove(*labels)
        self._labels.clear()
