"""What the ranks tell each other, through the store that torch.distributed has anyway.

Only whole values are set and read, no rank waits for another, and the connection is the monitor's own:
a training step is never blocked by this.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from forebay.loaders.pacing.lockstep import Lockstep
from forebay.loaders.pacing.report import RankReport

_VERDICT = "verdict"


class Board:
    """One job's. Raises RuntimeError kinds of torch when the store is gone."""

    def __init__(self, store: Any, job: str, world_size: int) -> None:
        self._store: Any = distributed_c10d.PrefixStore(f"forebay/pace/{job}", store)
        self._keys = [f"rank-{rank}" for rank in range(world_size)]

    def post(self, report: RankReport) -> None:
        self._store.set(self._keys[report.rank], msgspec.msgpack.encode(report))

    def reports(self) -> list[RankReport]:
        """Of the ranks that have told something."""
        there = [key for key in self._keys if self._store.check([key])]
        return [msgspec.msgpack.decode(value, type=RankReport) for value in self._store.multi_get(there)]

    def all_ready(self, rank: int, timeout_s: float) -> bool:
        """This rank is; are all of them, within that time?"""
        self._store.set(f"ready-{rank}", b"")
        try:
            self._store.wait(
                [f"ready-{rank}" for rank in range(len(self._keys))], timedelta(seconds=timeout_s)
            )
        except dist.DistStoreError:
            return False
        return True

    def announce(self, lockstep: Lockstep) -> None:
        """The first rank's word on all of them."""
        self._store.set(_VERDICT, msgspec.msgpack.encode(lockstep))

    def announced(self) -> Lockstep | None:
        if not self._store.check([_VERDICT]):
            return None
        return msgspec.msgpack.decode(self._store.get(_VERDICT), type=Lockstep)


@dataclass(frozen=True)
class JobStore:
    # torch's stores are not exported for type checkers.
    store: Any
    world_size: int
    timeout_s: float


def job_store() -> JobStore | None:
    """A connection of our own to the store of torch's process group; None when there is no group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store: Any = distributed_c10d._get_default_store()
    return JobStore(store.clone(), dist.get_world_size(), _timeout_s())


def _timeout_s() -> float:
    """After which a collective gives up: of this group, or what torch takes by default."""
    group = distributed_c10d._get_default_group()
    device: Any = torch.device(distributed_c10d._get_object_coll_device(group))
    options = getattr(group._get_backend(device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
    return timeout.total_seconds()
