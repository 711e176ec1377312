"""`forebay bench checkpoint`: how long does `save` block, against one plain copy of the same bytes?"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.report import Case, Report
from forebay.benchmarks.settings import environment
from forebay.checkpointd import Checkpointer

_ROUNDS = 7


def bench(tensors: int, tensor_bytes: int) -> Report:
    """The state: `tensors` float32 tensors of `tensor_bytes` each, on the CPU.

    Every round is taken when nothing drains: this measures the copy, not the contention.
    """
    state = {f"layer{i}": torch.randn(tensor_bytes // 4) for i in range(tensors)}
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as folder:
        floors, first, warm = _forebay(state, Path(folder))
        theirs = _async_save(state, Path(folder))
    floor = statistics.median(floors)
    figures = {
        "floor_s": floor,
        "blocked_s_first": first,
        "blocked_s_warm": statistics.median(warm),
        "blocked_over_floor": statistics.median(warm) / floor,
        "dcp_async_save_blocked_s": theirs,
    }
    case = Case(
        f"{tensors} x {tensor_bytes >> 20} MiB",
        figures,
        {"dcp.async_save": {"blocked_s": theirs, "over_floor": theirs / floor}},
        "medians; first: after prepare(); floor: the same tensors copied into touched memory",
    )
    return Report("checkpoint", figures, [case])


def _forebay(state: dict[str, torch.Tensor], folder: Path) -> tuple[list[float], float, list[float]]:
    """(floors, first save, later saves), floor and save in turns so that both see the same machine."""
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    # Nothing is removed meanwhile: unlinking gigabytes would disturb floor and save alike.
    home = environment(FOREBAY_HOME=str(folder / "home"), FOREBAY_CHECKPOINT__KEEP_LOCAL="100")
    with home, running_daemon("checkpoint", {}), Checkpointer("bench") as checkpoints:
        checkpoints.prepare(state)
        _copy(state, target)
        floors, blocked = [], []
        for step in range(_ROUNDS + 1):
            floors.append(_timed(lambda: _copy(state, target)))
            blocked.append(_timed(partial(checkpoints.save, step, state)))
            checkpoints.wait()
    return floors, blocked[0], blocked[1:]


def _copy(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


def _async_save(state: dict[str, torch.Tensor], folder: Path) -> float:
    """torch's own, in its default (thread) mode, one process."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        blocked = []
        for step in range(3):
            began_at = time.perf_counter()
            future = async_save(state, checkpoint_id=str(folder / f"dcp-{step}"))
            blocked.append(time.perf_counter() - began_at)
            (future if isinstance(future, Future) else future.upload_completion).result()
        return statistics.median(blocked)
    finally:
        dist.destroy_process_group()


def _timed(call: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    call()
    return time.perf_counter() - began_at
