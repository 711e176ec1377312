"""Mixture: several datasets, in shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from forebay.core.errors import InvalidRequest
from forebay.loaders.batch import SampleReader
from forebay.loaders.dataset import StagedDataset
from forebay.loaders.mixing.order import MixedOrder, Until
from forebay.loaders.mixing.session import SEPARATOR, MixedSession


class Mixture:
    """For a DataLoader, instead of one dataset: each sample comes from one of these, by weight.

    parts: (dataset, weight); the weights are relative. All have as many fields, and one `on_error`.
    until: a pass ends when the "first" dataset has no more samples, when "all" have ended once (those that
        end sooner come round again, in another order), or after that many samples.

    The next pass begins anew, in another order. Raises InvalidRequest.
    """

    def __init__(self, parts: Sequence[tuple[StagedDataset, float]], *, until: Until = "first") -> None:
        self.datasets = [dataset for dataset, _ in parts]
        self.weights = tuple(float(weight) for _, weight in parts)
        self.until: Until = until
        if not parts or not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise InvalidRequest(f"the weights of a mixture are above 0, not {self.weights}")
        if until not in ("first", "all") and not (isinstance(until, int) and until > 0):
            raise InvalidRequest(f"until is {until!r}", hint="'first', 'all', or a number of samples")
        _same("fields", [len(dataset.fields) for dataset in self.datasets])
        _same("on_error", [dataset.on_error for dataset in self.datasets])
        _same("one sample a shard", [dataset.single for dataset in self.datasets])
        _same("cache_dir", [dataset.cache_dir for dataset in self.datasets])
        self.single = self.datasets[0].single
        self.signature = (
            SEPARATOR.join(dataset.signature for dataset in self.datasets) + f";{self.weights};{until}"
        )
        self.reader = SampleReader([dataset.cut for dataset in self.datasets], self.datasets[0].on_error)

    def open_session(self, dataset_id: str | None = None, socket: Path | None = None) -> MixedSession:
        ids = dataset_id.split(SEPARATOR) if dataset_id else [None] * len(self.datasets)
        with ExitStack() as ends:
            sessions = []
            for dataset, own in zip(self.datasets, ids, strict=True):
                sessions.append(dataset.open_session(own, socket))
                ends.callback(sessions[-1].close)
            ends.pop_all()
        return MixedSession(sessions, [weight / sum(self.weights) for weight in self.weights])

    def order(self, session: MixedSession, shuffle: bool, seed: int, shuffle_block: int | None) -> MixedOrder:
        parts = [
            dataset.order(own, shuffle, seed + place, shuffle_block)
            for place, (dataset, own) in enumerate(zip(self.datasets, session.sessions, strict=True))
        ]
        return MixedOrder(tuple(parts), self.weights, self.until, seed, shuffle)


def _same(what: str, values: Sequence[object]) -> None:
    if len(set(values)) > 1:
        raise InvalidRequest(f"the datasets of a mixture differ in {what}: {', '.join(map(str, values))}")
