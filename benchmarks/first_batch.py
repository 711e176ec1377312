"""How soon the first batch is there: from a cold tier, from a hot one, and in the midst of a large epoch."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.loads import upload_tars
from forebay.benchmarks.report import Case
from forebay.benchmarks.seaweed import running_server
from forebay.benchmarks.settings import environment
from forebay.benchmarks.throttle import Schedule, throttled
from forebay.loaders import DataLoader, StagedDataset
from forebay.loaders.formats import Tokens

_ROUNDS = 5
_RATE_BPS = 24e6
_SHARDS, _SAMPLES, _SAMPLE_BYTES = 32, 20, 100_000
_MANY_SHARDS, _MANY_SAMPLES = 1000, 10_000


def first_batches(seed: int) -> list[Case]:
    return [_cold_and_hot(seed), _resumed()]


def _cold_and_hot(seed: int) -> Case:
    """Cold: against the time that the link takes for the shards which the first samples are drawn from."""
    with ExitStack() as stack:
        server = stack.enter_context(running_server())
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()))
        link = stack.enter_context(throttled(server.port, [Schedule(((0.0, _RATE_BPS),))]))
        shard_bytes = upload_tars(server.store(), "first", _SHARDS, _SAMPLES, _SAMPLE_BYTES, seed)
        stack.enter_context(
            environment(**{**server.env, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{link.ports[0]}"})
        )
        cold, hot = [], []
        for number in range(_ROUNDS):
            with environment(FOREBAY_HOME=f"{home}/{number}"), running_daemon("stager", {}):
                dataset = StagedDataset(server.url("first"), fields=("bin",), decode="array")
                loader = DataLoader(dataset, 8, shuffle=True, seed=seed)
                cold.append(_first_s(loader))
                list(loader)
                hot.append(_first_s(loader))
    transfer_s = dataset.format.block_shards * shard_bytes / _RATE_BPS
    figures = {
        "first_batch_over_transfer": statistics.median(cold) / transfer_s,
        "first_batch_cold_ms": statistics.median(cold) * 1e3,
        "first_batch_hot_ms": statistics.median(hot) * 1e3,
    }
    return Case(f"first batch, {dataset.format.block_shards} shards of 2 MB behind 24 MB/s", figures)


def _resumed() -> Case:
    """At 90 % of ten million samples: nothing before the position is read, and nothing is replayed."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as home:
        folder = Path(home) / "files"
        folder.mkdir()
        for shard in range(_MANY_SHARDS):
            np.arange(_MANY_SAMPLES, dtype=np.uint16).tofile(folder / f"{shard:04d}.bin")
        with environment(FOREBAY_HOME=f"{home}/home"), running_daemon("stager", {}):
            dataset = StagedDataset(str(folder), fields=("tokens",), format=Tokens(1, extra=0))
            loader = DataLoader(dataset, 64, shuffle=True)
            began_at = time.perf_counter()
            batches = len(loader)
            count_s = time.perf_counter() - began_at
            state = loader.state_dict()
            block_samples = state["block_shards"] * _MANY_SAMPLES
            samples = int(_MANY_SHARDS * _MANY_SAMPLES * 0.9)
            state["block"], state["offset"] = divmod(samples, block_samples)
            state["samples"] = samples
            taken = []
            for _ in range(_ROUNDS):
                again = DataLoader(dataset, 64, shuffle=True)
                again.load_state_dict(state)
                taken.append(_first_s(again))
    figures = {
        "resume_ms": statistics.median(taken) * 1e3,
        "samples": float(batches * 64),
        "count_all_s": count_s,
    }
    return Case("resume at 90 % of 10 million samples, hot", figures)


def _first_s(loader: DataLoader) -> float:
    """To the first batch, not to the end of what was begun for the others."""
    began_at = time.perf_counter()
    with closing(iter(loader)) as batches:
        next(batches)
        return time.perf_counter() - began_at
