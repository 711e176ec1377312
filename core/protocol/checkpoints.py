"""checkpointd's messages."""

from __future__ import annotations

from typing import Literal

import msgspec

from forebay.core.protocol.message import Message

Level = Literal["absorbed", "local", "durable", "committed"]
LEVELS: tuple[Level, ...] = ("absorbed", "local", "durable", "committed")


class Absorb(Message, tag="absorb", frozen=True):
    """Hand over a snapshot: descriptor of an arena (see checkpointd.arena) -> Absorbed."""

    run: str
    step: int
    attempt: str
    rank: int
    world_size: int
    generation: int
    upstream: str | None


class Absorbed(Message, tag="absorbed", frozen=True):
    size_bytes: int


class WaitLevel(Message, tag="wait_level", frozen=True):
    """-> AttemptStatus, when the level is reached or the attempt failed; else WaitTimeout."""

    run: str
    attempt: str
    rank: int
    level: Level
    timeout_s: float


class AttemptStatus(Message, tag="attempt_status", frozen=True):
    """How far one rank's part of an attempt came. Times are seconds since the epoch."""

    run: str
    step: int
    attempt: str
    rank: int
    level: Level
    size_bytes: int
    error: str | None
    absorbed_at: float
    local_at: float | None
    durable_at: float | None
    committed_at: float | None


class Checkpoint(msgspec.Struct, frozen=True):
    """A committed checkpoint, where it is, and whether its files are all there."""

    run: str
    step: int
    attempt: str
    world_size: int
    files: int
    size_bytes: int
    committed_at: float
    tiers: list[str]
    problem: str | None = None


class ListCheckpoints(Message, tag="list_checkpoints", frozen=True):
    """-> Checkpoints; all runs in the spool when `run` is None."""

    run: str | None = None
    upstream: str | None = None


class Checkpoints(Message, tag="checkpoints", frozen=True):
    """Newest first."""

    checkpoints: list[Checkpoint]


class OpenCheckpoint(Message, tag="open_checkpoint", frozen=True):
    """Verify and choose a checkpoint to restore -> CheckpointOpened.

    The newest valid one, or the one of `step` (and `attempt`).
    """

    run: str
    upstream: str | None
    step: int | None = None
    attempt: str | None = None


class CheckpointOpened(Message, tag="checkpoint_opened", frozen=True):
    """`skipped` says which newer candidates were passed over, and why."""

    checkpoint: Checkpoint
    names: list[str]
    skipped: list[str]


class OpenFile(Message, tag="open_file", frozen=True):
    """One file of a checkpoint that OpenCheckpoint chose -> Done + data."""

    run: str
    step: int
    attempt: str
    name: str


class VerifyCheckpoints(Message, tag="verify_checkpoints", frozen=True):
    """Read every byte of each tier's copy and compare -> Checkpoints with `problem` filled in."""

    run: str
    upstream: str | None
    step: int | None = None


class CheckpointStatus(Message, tag="checkpoint_status", frozen=True):
    pid: int
    node: str
    spool_dir: str
    attempts: list[AttemptStatus]
