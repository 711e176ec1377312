"""A checkpoint back into tensors: from memory, from NVMe, beside memcpy and the disk alone."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.host import dd
from forebay.benchmarks.peers.checkpoint import State
from forebay.benchmarks.report import Case
from forebay.benchmarks.settings import environment
from forebay.checkpointd import Checkpointer

_ROUNDS = 9


def restore(state: State) -> Case:
    """Into the trainer's own tensors, every digest compared; ceilings are measured in turns with it."""
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with (
        tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as folder,
        environment(FOREBAY_HOME=f"{folder}/home"),
        running_daemon("checkpoint", {}),
    ):
        checkpoints = Checkpointer("bench")
        checkpoints.save(1, state).wait()
        (file,) = Path(folder).rglob("*.safetensors")

        def back() -> None:
            checkpoints.restore(into=into)

        def copy() -> None:
            for name, tensor in state.items():
                into[name].copy_(tensor)

        back()
        memory = _ratio(back, copy)
        fresh = _ratio(lambda: checkpoints.restore(), copy)
        # From here on the daemon has no arena of it any more.
        checkpoints.close()
        back()
        cached = _ratio(back, lambda: dd(f"if={file}", "of=/dev/null"))
        direct = _ratio(
            back, lambda: dd(f"if={file}", "of=/dev/null", "iflag=direct"), lambda: _drop_cache(file)
        )
    figures = {
        "restore_memory_over_memcpy": memory,
        "restore_memory_fresh_over_memcpy": fresh,
        "restore_nvme_over_direct": direct,
        "restore_cached_over_read": cached,
    }
    note = (
        "ceiling seconds / ours, medians of pairs: memcpy into touched tensors; dd iflag=direct of the file; "
        "dd of the cached file, which touches one buffer only. Fresh: into new tensors"
    )
    return Case("back into tensors", figures, note=note)


def _ratio(
    ours: Callable[[], object], ceiling: Callable[[], object], before: Callable[[], object] = lambda: None
) -> float:
    return statistics.median(_timed(ceiling, before) / _timed(ours, before) for _ in range(_ROUNDS))


def _timed(call: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    began_at = time.perf_counter()
    call()
    return time.perf_counter() - began_at


def _drop_cache(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
