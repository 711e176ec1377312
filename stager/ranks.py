"""What the ranks on this node tell of themselves, each second, while they live."""

from __future__ import annotations

import time

from forebay.core import metrics
from forebay.core.protocol import Rank, RankState

_GAUGES = {
    "step": metrics.rank_step,
    "wait_s": metrics.rank_wait_seconds,
    "busy_s": metrics.rank_busy_seconds,
    "waiting_s": metrics.rank_waiting_seconds,
    "runway_s": metrics.rank_runway_seconds,
    "skew_share": metrics.rank_skew_share,
    "storage_bound": metrics.rank_storage_bound,
}


class RankBoard:
    """Of all sessions. Several loaders of a rank (training, validation) differ in their dataset."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._told: dict[tuple[int, int, str], Rank] = {}

    def told(self, session: int, state: RankState, dataset: str, tenant: str) -> None:
        self._told[session, state.rank, dataset] = Rank(self._node, dataset, tenant, time.time(), state)
        for field, gauge in _GAUGES.items():
            gauge.labels(str(state.rank), dataset).set(float(getattr(state, field)))

    def gone(self, session: int) -> None:
        for of_session, rank, dataset in [key for key in self._told if key[0] == session]:
            del self._told[of_session, rank, dataset]
            if any(key[1:] == (rank, dataset) for key in self._told):
                continue
            for gauge in _GAUGES.values():
                gauge.remove(str(rank), dataset)

    def all(self) -> list[Rank]:
        return sorted(self._told.values(), key=lambda rank: (rank.dataset, rank.state.rank))
