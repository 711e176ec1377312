"""Many saves in a row: does the memory of trainer or daemon grow?"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.report import Case
from forebay.benchmarks.settings import environment
from forebay.checkpointd import Checkpointer

_WARM_UP = 10
_TENSOR_BYTES = 8 << 20


def soak(saves: int) -> Case:
    """MiB per save that resident memory grows by, after the tenth; a line is fitted through all."""
    state = {"w": torch.randn(_TENSOR_BYTES // 4), "small": [torch.randn(100) for _ in range(200)]}
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as folder:
        home = environment(FOREBAY_HOME=f"{folder}/home")
        with home, running_daemon("checkpoint", {}) as daemon, Checkpointer("bench") as checkpoints:
            trainer, served = [], []
            for step in range(saves):
                checkpoints.save(step, state).wait()
                trainer.append(_rss_mib(os.getpid()))
                served.append(_rss_mib(daemon.pid))
    figures = {"rss_trainer_mib_per_save": _slope(trainer), "rss_daemon_mib_per_save": _slope(served)}
    return Case(f"{saves} saves in a row", figures, note="slope of resident memory after the tenth")


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _slope(values: list[float]) -> float:
    steady = values[_WARM_UP:]
    return float(np.polyfit(range(len(steady)), steady, 1)[0])
