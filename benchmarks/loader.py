"""`forebay bench loader`: samples per second from staged shards, beside other loaders on the same files."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.first_batch import first_batches
from forebay.benchmarks.loads import TOKENS, Load, decoded, loads, members
from forebay.benchmarks.peers.loaders import peers
from forebay.benchmarks.report import Case, Report
from forebay.benchmarks.settings import environment
from forebay.core.errors import InvalidRequest
from forebay.loaders import DataLoader, StagedDataset
from forebay.loaders.formats import Tokens

_EPOCHS = 5
_SOON = ("first_batch_over_transfer", "first_batch_hot_ms", "resume_ms")


def bench(scale: float, batch_size: int, workers: int, seed: int) -> Report:
    """All read whole epochs, hot, from the page cache, in turns; medians without the first epoch."""
    found = [(load, _case(load, batch_size, workers, seed)) for load in loads(scale)]
    cases = [case for _, case in found]
    figures = {
        "ratio_undecoded": min(case.figures["ratio"] for load, case in found if not load.is_image),
        "ratio_vs_best_peer": min(case.figures["ratio"] for case in cases),
        "floor_ratio": min(case.figures["floor_ratio"] for case in cases),
    }
    soon = first_batches(seed)
    for case in soon:
        figures |= {key: case.figures[key] for key in _SOON if key in case.figures}
    return Report("loader", figures, cases + soon, seed)


def _case(load: Load, batch_size: int, workers: int, seed: int) -> Case:
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as folder:
        files = Path(folder) / "files"
        files.mkdir()
        load.write(files, random.Random(seed))
        with environment(FOREBAY_HOME=f"{folder}/home"), running_daemon("stager", {}):
            contestants: dict[str, Iterable[Any]] = {"forebay": _ours(load, files, batch_size, workers, seed)}
            contestants |= peers(load, files, Path(folder), batch_size, workers)
            _check(contestants)
            rates: dict[str, list[float]] = {name: [] for name in contestants}
            for _ in range(_EPOCHS):
                for name, batches in contestants.items():
                    rates[name].append(_rate(partial(_count, batches), load.samples))
            floor = _rate(partial(_floor, load, batch_size), load.samples)
            left = {"decode_alone_per_s": _decode_alone(files, workers)} if load.is_image else {}
    found = {name: statistics.median(rate[1:]) for name, rate in rates.items()}
    best = max(rate for name, rate in found.items() if name != "forebay")
    mine = found.pop("forebay")
    figures = {
        "samples_per_s": mine,
        "ratio": mine / best,
        "floor_samples_per_s": floor,
        "floor_ratio": mine / floor,
        **left,
    }
    others = {name: {"samples_per_s": rate} for name, rate in found.items()}
    name = f"{load.name}: {load.samples} samples, batch {batch_size}, {workers} threads or workers"
    return Case(name, figures, others, "floor: the same bytes of warm memory copied into one warm batch")


def _ours(load: Load, files: Path, batch_size: int, workers: int, seed: int) -> DataLoader:
    if load.is_tokens:
        dataset = StagedDataset(str(files), fields=("tokens",), format=Tokens(TOKENS))
    else:
        how: Any = decoded if load.is_image else "array"
        dataset = StagedDataset(str(files), fields=(load.field,), decode=how)
    return DataLoader(dataset, batch_size, shuffle=True, seed=seed, num_workers=workers)


def _check(contestants: dict[str, Iterable[Any]]) -> None:
    """All hand out the same samples. Raises InvalidRequest."""
    sums = {name: sum(map(_sum, batches)) for name, batches in contestants.items()}
    if len(set(sums.values())) != 1:
        raise InvalidRequest(f"the loaders do not yield the same bytes: {sums}")


def _sum(batch: Any) -> int:
    if isinstance(batch, bytes):
        return int(np.frombuffer(batch, np.uint8).sum(dtype=np.int64))
    if isinstance(batch, list | tuple):
        return sum(map(_sum, batch))
    return int(np.asarray(batch).sum(dtype=np.int64))


def _count(batches: Iterable[Any]) -> int:
    return sum(len(batch) if _is_column(batch) else len(batch[0]) for batch in batches)


def _is_column(batch: Any) -> bool:
    return not isinstance(batch, tuple | list) or isinstance(batch[0], bytes)


def _rate(run: Callable[[], int], expected: int) -> float:
    began_at = time.perf_counter()
    found = run()
    if found != expected:
        raise InvalidRequest(f"a loader yielded {found} samples instead of {expected}")
    return expected / (time.perf_counter() - began_at)


def _decode_alone(files: Path, workers: int) -> float:
    """What the shared decoder allows: that many threads, bytes in memory, no batches."""
    values = list(members(files))
    with ThreadPoolExecutor(workers) as pool:
        began_at = time.perf_counter()
        found = sum(1 for _ in pool.map(decoded, values))
        return found / (time.perf_counter() - began_at)


def _floor(load: Load, batch_size: int) -> int:
    """One thread: nothing can be faster by copying."""
    source = torch.ones(batch_size, load.sample_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    for _ in range(load.samples // batch_size):
        target.copy_(source)
    return load.samples
