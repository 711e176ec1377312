"""Checkpointer: what a training script uses."""

from __future__ import annotations

import json
import logging
import os
import secrets
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from forebay.checkpointd.container import SKELETON, OpenContainer, lay_out
from forebay.checkpointd.handover import Handover, SaveHandle, Target
from forebay.checkpointd.layout import check_attempt, check_run, rank_file
from forebay.checkpointd.state import Flattened, unflatten
from forebay.core.channel import Channel
from forebay.core.config import Settings
from forebay.core.errors import InvalidRequest, NoCheckpoint
from forebay.core.protocol import (
    AttemptStatus,
    Checkpoint,
    CheckpointOpened,
    Checkpoints,
    Done,
    Level,
    ListCheckpoints,
    OpenCheckpoint,
    OpenFile,
)

log = logging.getLogger("forebay.checkpointd")

__all__ = ["Checkpointer", "SaveHandle"]

_READ_S = 3600.0


class Checkpointer:
    """Saves and restores one run's state, through the checkpointd of this node.

    run: its name, and that of its folder upstream.
    upstream: where checkpoints become durable (any Store URL); None keeps them in the spool alone.
    rank, world_size: from torch.distributed when it is initialised, else 0 and 1.
    session: what all ranks of one start of the job have in common; broadcast by rank 0 when
        torch.distributed is initialised, to be given otherwise when there are several ranks.
    buffers: snapshots that may wait for the disk at once, each as large as the state.
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
    ) -> None:
        self.run = check_run(run)
        self.upstream = upstream
        together = dist.is_available() and dist.is_initialized()
        self.rank = (dist.get_rank() if together else 0) if rank is None else rank
        self.world_size = (dist.get_world_size() if together else 1) if world_size is None else world_size
        self._session = check_attempt(session or _agree_on_session(self.world_size, together))
        self._saves = 0
        self._settings = Settings.load()
        self._handover = Handover(self._settings, buffers)

    def prepare(self, state: Any) -> None:
        """Reserve and touch the memory of later saves, so that the first is as fast as the others.

        Raises CheckpointError when the host lacks the memory.
        """
        flat = Flattened(state)
        self._handover.prepare(lay_out(flat.tensors, _metadata(flat)).size_bytes)

    def save(self, step: int, state: Any) -> SaveHandle:
        """Absorb a snapshot and return; the daemon makes it durable and commits it.

        Later changes of the tensors cannot change what is saved. Every rank calls it for every step.
        Raises UnsupportedValue, DaemonUnavailable; SaveFailed when an earlier save has failed since.
        """
        flat = Flattened(state)
        container = lay_out(flat.tensors, _metadata(flat))
        self._saves += 1
        attempt = f"{self._session}-{self._saves:06d}"
        target = Target(self.run, step, attempt, self.rank, self.world_size, self.upstream)
        return self._handover.send(
            target, container.size_bytes, lambda into: container.fill(into, flat.tensors)
        )

    def wait(self, level: Level = "committed", timeout_s: float | None = None) -> AttemptStatus | None:
        """Wait for the last save; None when there was none. Raises SaveFailed, WaitTimeout."""
        return self._handover.last.wait(level, timeout_s) if self._handover.last else None

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint whose files are all there; None when there is none."""
        with self._connect() as channel:
            listed, _ = channel.request(
                ListCheckpoints(self.run, self.upstream), expect=Checkpoints, timeout_s=_READ_S
            )
        return next((c for c in listed.checkpoints if c.problem is None), None)

    def restore(
        self,
        step: int | None = None,
        *,
        rank: int | None = None,
        map_location: str | torch.device = "cpu",
    ) -> tuple[int, Any]:
        """(step, state) of the newest checkpoint whose every digest fits, or of the given step.

        From the spool when it is there, else from upstream; older ones when newer ones are damaged,
        and that is said. With torch.distributed all ranks restore what rank 0 found. `rank` restores
        another rank's state. Raises NoCheckpoint, CheckpointCorrupt.
        """
        with self._connect() as channel:
            opened = self._choose(channel, step)
            for reason in opened.skipped:
                log.warning("passed over: %s", reason)
            checkpoint = opened.checkpoint
            name = rank_file(self.rank if rank is None else rank)
            if name not in opened.names:
                raise NoCheckpoint(
                    f"{self.run} at step {checkpoint.step} was saved by {checkpoint.world_size} ranks, "
                    f"there is no {name}",
                    hint="restore(rank=0) reads another rank's state; "
                    "torch.distributed.checkpoint with ForebayReader reshards",
                )
            request = OpenFile(self.run, checkpoint.step, checkpoint.attempt, name)
            _, (fd,) = channel.request(request, expect=Done, timeout_s=_READ_S)
        try:
            container = OpenContainer(fd, name)
            tensors = {n: container.tensor(n).to(map_location) for n in container.names}
            return checkpoint.step, unflatten(container.skeleton(), tensors)
        finally:
            os.close(fd)

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

    def _connect(self) -> Channel:
        return Channel.connect(self._settings.checkpoint_socket, "trainer")

    def _choose(self, channel: Channel, step: int | None) -> CheckpointOpened:
        attempt = None
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if together and dist.get_rank() > 0:
            step, attempt = _broadcast(None)
        try:
            request = OpenCheckpoint(self.run, self.upstream, step, attempt)
            opened, _ = channel.request(request, expect=CheckpointOpened, timeout_s=_READ_S)
        except BaseException:
            # The others wait for rank 0's answer: let them look for themselves and fail likewise.
            if together and dist.get_rank() == 0:
                _broadcast((step, None))
            raise
        if together and dist.get_rank() == 0:
            _broadcast((opened.checkpoint.step, opened.checkpoint.attempt))
        return opened


def _metadata(flat: Flattened) -> dict[str, str]:
    return {SKELETON: json.dumps(flat.skeleton, separators=(",", ":"))}


def _agree_on_session(world_size: int, together: bool) -> str:
    own = secrets.token_hex(6)
    if world_size == 1:
        return own
    if not together:
        raise InvalidRequest(
            f"{world_size} ranks, but torch.distributed is not initialised",
            hint="initialise it first, or pass the same new session= on every rank",
        )
    agreed: str = _broadcast(own)
    return agreed


def _broadcast(value: Any) -> Any:
    """Rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
