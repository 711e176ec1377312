"""Other loaders on the same samples, each as its own documentation sets it up to be fast, one file each.

A peer that has a format of its own gets the samples written in it, before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forebay.benchmarks.loads import Load
from forebay.benchmarks.peers.loaders import grain, litdata, memmap, torchdata, webdataset

# (load, its files, room for others, batch size, workers) -> batches; None where it has nothing for that load.
Peer = Callable[[Load, Path, Path, int, int], Iterable[Any] | None]

_PEERS: dict[str, tuple[str, Peer]] = {
    "webdataset": ("webdataset", webdataset.batches),
    "torch DataLoader, memmap": ("torch", memmap.batches),
    "torchdata.nodes": ("torchdata", torchdata.batches),
    "litdata": ("litdata", litdata.batches),
    "grain": ("grain", grain.batches),
}


def peers(load: Load, files: Path, room: Path, batch_size: int, workers: int) -> dict[str, Iterable[Any]]:
    """Of those that are installed."""
    found = {}
    for name, (module, batches) in _PEERS.items():
        made = batches(load, files, room, batch_size, workers) if find_spec(module) else None
        if made is not None:
            found[name] = made
    return found
