"""`forebay bench checkpoint`: how long a save blocks, how fast it drains, how fast it comes back."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from forebay.benchmarks import drain, soak
from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.peers.checkpoint import State, blocked, one_process_group, peers
from forebay.benchmarks.report import Case, Report
from forebay.benchmarks.restore import restore
from forebay.benchmarks.settings import environment
from forebay.checkpointd import Checkpointer

_ROUNDS = 7
_PEER_ROUNDS = 3
# (tensors, bytes of each)
SHAPES = ((32, 32 << 20), (2000, 512 << 10))


def bench(saves: int) -> Report:
    """All of it; `saves` in a row for the look at memory."""
    state = make(*SHAPES[0])
    parts = [partial(_blocked_case, tensors, size_bytes) for tensors, size_bytes in SHAPES]
    parts += [partial(part, state) for part in (drain.drain, drain.upload, drain.slowdown, restore)]
    cases = []
    for part in [*parts, partial(soak.soak, saves)]:
        # What the one before left in the page cache is not to be written beside this one.
        os.sync()
        cases.append(part())
    worst = {
        "blocked_over_floor": max(case.figures["blocked_over_floor"] for case in cases[: len(SHAPES)]),
        "blocked_over_async_save": max(case.figures["over_async_save"] for case in cases[: len(SHAPES)]),
    }
    figures = dict(worst)
    for case in cases[len(SHAPES) :]:
        figures |= case.figures
    return Report("checkpoint", figures, cases)


def make(tensors: int, size_bytes: int) -> State:
    return {f"layer{number}": torch.randn(size_bytes // 4) for number in range(tensors)}


def _blocked_case(tensors: int, size_bytes: int) -> Case:
    """Every round is taken when nothing drains: this measures the copy, not the contention."""
    state = make(tensors, size_bytes)
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as folder:
        floors, first, later = _forebay(state, Path(folder))
        floor = statistics.median(floors)
        theirs = {}
        for number, (name, save) in enumerate(peers().items()):
            place = Path(folder) / str(number)
            place.mkdir()
            with one_process_group(place):
                blocked_s = statistics.median(blocked(save, state, place, _PEER_ROUNDS))
            theirs[name] = {"blocked_s": blocked_s, "blocked_over_floor": blocked_s / floor}
    ours = statistics.median(later)
    figures = {
        "floor_s": floor,
        "blocked_s_first": first,
        "blocked_s": ours,
        "blocked_over_floor": ours / floor,
        "over_async_save": ours / theirs["dcp.async_save"]["blocked_s"],
    }
    note = "medians; first: after prepare(); floor: the same tensors copied into touched memory"
    return Case(f"{tensors} x {size_bytes >> 10} KiB", figures, theirs, note)


def _forebay(state: State, folder: Path) -> tuple[list[float], float, list[float]]:
    """(floors, first save, later saves), floor and save in turns so that both see the same machine."""
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    # Nothing is removed meanwhile: unlinking gigabytes would disturb floor and save alike.
    home = environment(FOREBAY_HOME=str(folder / "home"), FOREBAY_CHECKPOINT__KEEP_LOCAL="100")
    with home, running_daemon("checkpoint", {}), Checkpointer("bench") as checkpoints:
        checkpoints.prepare(state, wait=True)
        _copy(state, target)
        floors, seconds = [], []
        for step in range(_ROUNDS + 1):
            floors.append(_timed(lambda: _copy(state, target)))
            seconds.append(_timed(partial(checkpoints.save, step, state)))
            checkpoints.wait()
    return floors, seconds[0], seconds[1:]


def _copy(source: State, target: State) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


def _timed(call: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    call()
    return time.perf_counter() - began_at
