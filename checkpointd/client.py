"""Checkpointer: what a training script uses."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import msgspec
import torch

from forebay.checkpointd.agree import Ranks
from forebay.checkpointd.container import SKELETON, lay_out
from forebay.checkpointd.handover import Handover, OnError, SaveHandle, Target
from forebay.checkpointd.layout import check_attempt, check_run
from forebay.checkpointd.load import Into
from forebay.checkpointd.reader import Reader
from forebay.checkpointd.state import Flattened, unflatten
from forebay.core.config import Settings
from forebay.core.errors import CheckpointCorrupt, InvalidRequest, UnsupportedValue
from forebay.core.protocol import About, AttemptStatus, Checkpoint, CheckpointOpened, Keep, Level

__all__ = ["Checkpointer", "SaveHandle"]

Policy = Literal["block", "skip", "fail"]


class Checkpointer:
    """Saves and restores one run's state, through the checkpointd of this node.

    run: its name, and that of its folder upstream.
    upstream: where checkpoints become durable (any Store URL); None keeps them in the spool alone.
    rank, world_size: from torch.distributed when it is initialised, else 0 and 1.
    session: what all ranks of one start of the job have in common; broadcast by rank 0 when
        torch.distributed is initialised, to be given otherwise when there are several ranks.
    buffers: snapshots that may wait for the disk at once, each as large as the state.
    policy: when all buffers still wait for the disk, `block` until one is free (checkpoint.wait_s at
        most), `skip` this save (all ranks agree on it), or `fail` it.
    on_error: what becomes of a save that failed after it returned: `raise` at the next call, `warn` in
        the log, or a number: raise when so many in a row have failed.
    keep: which checkpoints stay upstream; all of them by default.
    overlap: `save` returns while copies from a GPU are still under way. The tensors must not change before
        `wait_before_step`: `optimizer.register_step_pre_hook(checkpoints.wait_before_step)` sees to it.
    reuse: parts of the file that have not changed since the last save (frozen layers) are copied by S3
        itself, not sent again; each checkpoint stays complete and readable on its own.
    """

    def __init__(
        self,
        run: str,
        *,
        upstream: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        session: str | None = None,
        buffers: int = 2,
        policy: Policy = "block",
        on_error: OnError = "raise",
        keep: Keep | None = None,
        reuse: bool = False,
        overlap: bool = False,
    ) -> None:
        self.run = check_run(run)
        self.upstream = upstream
        self._ranks = Ranks()
        self.rank = self._ranks.rank if rank is None else rank
        self.world_size = self._ranks.size if world_size is None else world_size
        self._session = check_attempt(session or self._ranks.session(self.world_size))
        self._policy = policy
        self._keep = keep or Keep()
        self._reuse = reuse
        self._saves = 0
        self._settings = Settings.load()
        self._handover = Handover(self._settings, buffers, on_error, overlap=overlap)
        self._reader = Reader(self._settings, run, upstream, self._ranks)
        self._every_steps: int | None = None
        self._every_s: float | None = None
        self._last_at = time.monotonic()

    def prepare(self, state: Any, *, wait: bool = False) -> None:
        """Reserve and touch the memory of later saves, in the background: the first is then as fast as the
        others. Without it the first save does so for itself. `wait`: return when it is done.

        Raises CheckpointError when the host lacks the memory.
        """
        flat = Flattened(state)
        self._handover.prepare(lay_out(flat.tensors, _metadata(flat)).size_bytes, wait=wait)

    def save(
        self,
        step: int,
        state: Any,
        *,
        metadata: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Absorb a snapshot and return; the daemon makes it durable and commits it.

        Later changes of the tensors cannot change what is saved. Every rank calls it for every step.
        `metadata` (plain JSON) and `metrics` (for Keep's `best`) are kept in the commit, rank 0's.
        Raises UnsupportedValue, DaemonUnavailable; SaveFailed when an earlier save has failed since.
        """
        about = _about(metadata, metrics, self._keep, self._reuse)
        flat = Flattened(state)
        container = lay_out(flat.tensors, _metadata(flat))
        self._saves += 1
        self._last_at = time.monotonic()
        attempt = f"{self._session}-{self._saves:06d}"
        target = Target(self.run, step, attempt, self.rank, self.world_size, self.upstream, about)
        self._handover.report_failure()
        if self._policy != "block" and any(self._ranks.gather(not self._handover.free())):
            return self._handover.refuse(target, self._policy == "skip")
        return self._handover.send(target, container, flat.tensors)

    def wait_before_step(self, *_: object) -> None:
        """Until the tensors may change: what `save` saw has been absorbed. Of use with `overlap`.

        Raises what went wrong on the way to checkpointd.
        """
        self._handover.left()

    def every(self, *, steps: int | None = None, seconds: float | None = None) -> Checkpointer:
        """How often `due` says yes: each so many steps, or when so much time has passed.

        By seconds, rank 0 decides at each call of `due`, which is then a collective.
        """
        if (steps is not None and steps < 1) or (seconds is not None and seconds <= 0):
            raise InvalidRequest(f"every(steps={steps}, seconds={seconds})", hint="numbers above 0")
        self._every_steps, self._every_s = steps, seconds
        return self

    def due(self, step: int) -> bool:
        """It is time to save, the same on every rank."""
        if self._every_steps is not None and step > 0 and step % self._every_steps == 0:
            return True
        if self._every_s is None:
            return False
        late = time.monotonic() - self._last_at >= self._every_s
        return bool(self._ranks.broadcast(late))

    def wait(self, level: Level = "committed", timeout_s: float | None = None) -> AttemptStatus | None:
        """Wait for the last save; None when there was none. Raises SaveFailed, WaitTimeout."""
        return self._handover.last.wait(level, timeout_s) if self._handover.last else None

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint whose files are all there; None when there is none."""
        return self._reader.latest()

    def preview(self, step: int | None = None) -> CheckpointOpened:
        """What `restore` would take, and which tiers have each file. Raises NoCheckpoint."""
        return self._reader.preview(step)

    def restore(
        self,
        step: int | None = None,
        *,
        rank: int | None = None,
        map_location: str | torch.device = "cpu",
        into: Any = None,
        strict: bool = True,
    ) -> tuple[int, Any]:
        """(step, state) of the newest checkpoint whose every digest fits, or of the given step.

        into: a state whose tensors are filled where they are; what is no tensor is returned anew.
            `strict` demands that it has exactly the tensors that were saved, in their shapes.
        rank: another rank's state. When torch.distributed is initialised, every rank calls it, and all
            take the same checkpoint, one that each of them could read.
        Raises NoCheckpoint, CheckpointCorrupt; InvalidRequest when `into` does not fit.
        """
        targets = Flattened(into).tensors if into is not None else {}
        wanted = Into(targets, strict and into is not None)
        opened, loaded = self._reader.restore(step, self.rank if rank is None else rank, wanted)
        if SKELETON not in loaded.metadata:
            raise CheckpointCorrupt(
                f"{self.run} at step {opened.checkpoint.step} holds bare tensors, no state",
                hint="it was saved through torch.distributed.checkpoint: load it with ForebayReader",
            )
        tensors = {
            name: tensor if name in targets else tensor.to(map_location)
            for name, tensor in loaded.tensors.items()
        }
        return opened.checkpoint.step, unflatten(json.loads(loaded.metadata[SKELETON]), tensors)

    def close(self) -> None:
        """Raises SaveFailed when the last save has failed and nothing has said so yet."""
        try:
            self._handover.report_failure()
        finally:
            self._handover.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _metadata(flat: Flattened) -> dict[str, str]:
    return {SKELETON: json.dumps(flat.skeleton, separators=(",", ":"))}


def _about(
    metadata: Mapping[str, Any] | None, metrics: Mapping[str, float] | None, keep: Keep, reuse: bool
) -> About:
    try:
        plain = msgspec.json.decode(msgspec.json.encode(dict(metadata or {})), type=dict[str, Any])
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        known = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return About(plain, known, keep, reuse)
    except (TypeError, ValueError) as err:
        raise UnsupportedValue(f"metadata or metrics cannot be kept: {err}", hint="plain JSON") from err
