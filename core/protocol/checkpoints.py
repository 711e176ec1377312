"""checkpointd's messages."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from forebay.core.protocol.message import Message

Level = Literal["absorbed", "local", "replicated", "durable", "committed"]
LEVELS: tuple[Level, ...] = ("absorbed", "local", "replicated", "durable", "committed")


class Keep(msgspec.Struct, frozen=True):
    """Which committed checkpoints of a run stay: each rule keeps some; without any, all stay.

    `last` newest ones; every step that `every` divides; the `best` by `metric`; those younger than
    `age_s`. The newest always stays (C5).
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str = ""
    mode: Literal["min", "max"] = "min"
    age_s: float | None = None


class About(msgspec.Struct, frozen=True):
    """What a save says of itself, kept in its manifest and its commit. `metadata` is plain JSON.

    What is no number (NaN, infinity) is None in `metrics`: JSON has no other word for it.
    `reuse`: parts that the last save of this rank had too are copied upstream, not sent.
    """

    metadata: dict[str, Any] = {}
    metrics: dict[str, float | None] = {}
    keep: Keep = Keep()
    reuse: bool = False


class Wave(msgspec.Struct, frozen=True):
    """What an arena holds of a file larger than itself: its bytes from `offset` on."""

    offset: int
    total_bytes: int


class Absorb(Message, tag="absorb", frozen=True):
    """Hand over a snapshot: descriptor of an arena (see checkpointd.arena) -> Absorbed.

    With a `wave` the arena holds a part only, the reply comes when that is written, and the snapshot is
    absorbed, and on the disk, with the last part.
    """

    run: str
    step: int
    attempt: str
    rank: int
    world_size: int
    generation: int
    upstream: str | None
    about: About = About()
    wave: Wave | None = None


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
    """How far one rank's part of an attempt came. Times are seconds since the epoch.

    `same_as`: the step that was saved before, when the tensors seem to be the same ones.
    """

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
    replicated_at: float | None = None
    same_as: int | None = None


class Farewell(Message, tag="farewell", frozen=True):
    """The trainer ends on purpose: its snapshots need not stay in memory for a restart -> Done."""


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
    metrics: dict[str, float | None] = {}


class ListCheckpoints(Message, tag="list_checkpoints", frozen=True):
    """-> Checkpoints; all runs in the spool when `run` is None."""

    run: str | None = None
    upstream: str | None = None


class Checkpoints(Message, tag="checkpoints", frozen=True):
    """Newest first."""

    checkpoints: list[Checkpoint]


class OpenCheckpoint(Message, tag="open_checkpoint", frozen=True):
    """Choose a checkpoint to restore, and have its files on this node -> CheckpointOpened.

    The newest, or the one of `step` (and `attempt`), but for the attempts in `skip`. `names`: the
    files that are needed here, all when None. `verify`: every byte of them is compared now, and what
    is damaged is replaced; otherwise that is for the reader to do, who then asks for RepairFile.
    `look`: only say what would be taken from where.
    """

    run: str
    upstream: str | None
    step: int | None = None
    attempt: str | None = None
    names: list[str] | None = None
    skip: dict[str, str] = {}
    verify: bool = False
    look: bool = False


class CheckpointFile(msgspec.Struct, frozen=True):
    """`digest` is xxh3-128. `tiers` hold it, the nearest first: memory, spool, upstream."""

    name: str
    size_bytes: int
    digest: str
    tiers: list[str]


class CheckpointOpened(Message, tag="checkpoint_opened", frozen=True):
    """`skipped` says which newer candidates were passed over, and why."""

    checkpoint: Checkpoint
    files: list[CheckpointFile]
    skipped: list[str]
    metadata: dict[str, Any] = {}


class OpenFile(Message, tag="open_file", frozen=True):
    """One file of a checkpoint that OpenCheckpoint chose -> FileReady + data.

    From `memory` only when that is wished: the file begins at an offset there, and ends before the map.
    """

    run: str
    step: int
    attempt: str
    name: str
    memory: bool = False


class FileReady(Message, tag="file_ready", frozen=True):
    tier: str
    offset: int


class RepairFile(Message, tag="repair_file", frozen=True):
    """What was read from `tier` did not fit its digest: look, and take it from the next tier -> Done.

    Raises CheckpointCorrupt when no tier has it whole.
    """

    run: str
    upstream: str | None
    step: int
    attempt: str
    name: str
    tier: str


class Prune(Message, tag="prune", frozen=True):
    """Apply a rule to the checkpoints of a run now -> Checkpoints: those that went, or would go."""

    run: str
    upstream: str | None
    keep: Keep
    dry_run: bool = False


class RemoveCheckpoint(Message, tag="remove_checkpoint", frozen=True):
    """One step of a run, from one tier -> Checkpoints: what went, or would go.

    Raises NoCheckpoint; WrongState for the newest, a pinned one, or one that is being read.
    """

    run: str
    upstream: str | None
    step: int
    dry_run: bool = False


class PinCheckpoint(Message, tag="pin_checkpoint", frozen=True):
    """Retention leaves it alone, on every tier, until it is unpinned -> Done. Raises NoCheckpoint."""

    run: str
    upstream: str | None
    step: int
    pinned: bool = True


class Flush(Message, tag="flush", frozen=True):
    """Bring what is absorbed up to `level`, the newest first, until the time is over -> Flushed."""

    level: Level
    deadline_s: float


class Flushed(Message, tag="flushed", frozen=True):
    """What was open, as it is now."""

    attempts: list[AttemptStatus]


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
