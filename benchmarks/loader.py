"""`forebay bench loader`: samples per second from staged tars, beside webdataset on the same files."""

from __future__ import annotations

import io
import random
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.report import Case, Report
from forebay.benchmarks.settings import environment
from forebay.core.errors import InvalidRequest
from forebay.loaders import DataLoader, StagedDataset

_EPOCHS = 5


def bench(shards: int, samples: int, sample_bytes: int, batch_size: int, workers: int, seed: int) -> Report:
    """Both read whole epochs, hot, undecoded, from the page cache, in turns; medians.

    Forebay yields uint8 tensors (batch, bytes), webdataset lists of bytes: its fastest form.
    """
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as folder:
        tars = write_tars(Path(folder) / "tars", shards, samples, sample_bytes, seed)
        with environment(FOREBAY_HOME=f"{folder}/home"), running_daemon("stager", {}):
            dataset = StagedDataset(str(tars), fields=("bin",), decode={"bin": "array"})
            ours = DataLoader(dataset, batch_size, shuffle=True, seed=seed, num_threads=workers)
            theirs = _webdataset(tars, batch_size, workers)
            count = shards * samples
            rates: dict[str, list[float]] = {"forebay": [], "webdataset": []}
            for _ in range(_EPOCHS):
                rates["webdataset"].append(_rate(lambda: _count(theirs()), count))
                rates["forebay"].append(_rate(lambda: _count(ours), count))
            floor = _rate(lambda: _floor(count, batch_size, sample_bytes), count)
    # The first epoch stages and indexes: the hot case is what comes after it.
    mine, peer = statistics.median(rates["forebay"][1:]), statistics.median(rates["webdataset"][1:])
    figures = {
        "forebay_samples_per_s": mine,
        "webdataset_samples_per_s": peer,
        "ratio": mine / peer,
        "memcpy_samples_per_s": floor,
        "floor_ratio": mine / floor,
    }
    name = f"{shards} tars x {samples} x {sample_bytes} B, batch {batch_size}, {workers} threads or workers"
    return Report("loader", figures, [Case(name, figures, {"webdataset": {"samples_per_s": peer}})], seed)


def write_tars(folder: Path, shards: int, samples: int, sample_bytes: int, seed: int) -> Path:
    folder.mkdir(parents=True)
    noise = random.Random(seed)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for sample in range(samples):
                member = tarfile.TarInfo(f"{shard:05d}-{sample:06d}.bin")
                member.size = sample_bytes
                tar.addfile(member, io.BytesIO(noise.randbytes(sample_bytes)))
    return folder


def _webdataset(tars: Path, batch_size: int, workers: int) -> Callable[[], Iterable[Any]]:
    import webdataset as wds

    urls = [str(path) for path in sorted(tars.glob("*.tar"))]
    dataset = wds.WebDataset(urls, shardshuffle=False, empty_check=False).to_tuple("bin").batched(batch_size)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers)
    return lambda: iter(loader)


def _count(batches: Iterable[Any]) -> int:
    return sum(len(batch[0]) for batch in batches)


def _rate(run: Callable[[], int], expected: int) -> float:
    began_at = time.perf_counter()
    found = run()
    if found != expected:
        raise InvalidRequest(f"a loader yielded {found} samples instead of {expected}")
    return expected / (time.perf_counter() - began_at)


def _floor(count: int, batch_size: int, sample_bytes: int) -> int:
    """The same bytes from warm memory into one warm batch, one thread: nothing can be faster by copying."""
    source = torch.ones(batch_size, sample_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    for _ in range(count // batch_size):
        target.copy_(source)
    return count
