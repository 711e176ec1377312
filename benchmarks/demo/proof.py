"""From the ranks' logs to the claims: what was lost, what was repeated, what was the same."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict

from forebay.benchmarks.demo.job import Step

Logs = list[list[Step]]
"""One list of steps per rank."""


def before(logs: Logs, step: int) -> Logs:
    return [[entry for entry in rank if entry.step <= step] for rank in logs]


def lost_and_repeated(first: Logs, second: Logs, reference: Logs) -> tuple[int, int]:
    """Samples of the job that was killed, against the undisturbed one's, epoch by epoch."""
    seen, expected = _by_epoch([*first, *second]), _by_epoch(reference)
    lost = sum((expected[epoch] - seen[epoch]).total() for epoch in expected)
    repeated = sum((seen[epoch] - expected[epoch]).total() for epoch in seen | expected)
    return lost, repeated


def global_batches(logs: Logs) -> dict[int, tuple[str, ...]]:
    """Step -> the ranks' digests, in order of ranks."""
    batches: dict[int, list[str]] = defaultdict(list)
    for rank in logs:
        for entry in rank:
            batches[entry.step].append(entry.digest)
    return {step: tuple(digests) for step, digests in batches.items()}


def blocked_ms_p50(logs: Logs) -> float:
    return statistics.median(e.blocked_ms for rank in logs for e in rank if e.blocked_ms is not None)


def _by_epoch(logs: Logs) -> dict[int, Counter[str]]:
    epochs: dict[int, Counter[str]] = defaultdict(Counter)
    for rank in logs:
        for entry in rank:
            epochs[entry.epoch].update(entry.keys)
    return epochs
