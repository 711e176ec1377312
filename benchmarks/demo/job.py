"""What the story tells the training script, and what the script writes down."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Job(msgspec.Struct, frozen=True):
    """One start of the training. `progress` is a socket that hears of each step."""

    run: str
    dataset: str
    upstream: str
    epochs: int
    batch_size: int
    checkpoint_every: int
    shuffle_block: int
    seed: int
    folder: str
    progress: str | None = None

    def log(self, rank: int) -> Path:
        return Path(self.folder, f"rank-{rank}.jsonl")

    @property
    def output(self) -> Path:
        return Path(self.folder, "output.log")

    @property
    def result(self) -> Path:
        return Path(self.folder, "result.json")


class Step(msgspec.Struct, frozen=True):
    """One step of one rank: which samples, and a digest of the batch's bytes."""

    step: int
    epoch: int
    keys: list[str]
    digest: str
    blocked_ms: float | None = None


class Result(msgspec.Struct, frozen=True):
    accuracy: float
    steps: int
    resumed_from_step: int
    weights_digest: str


class Outcome(msgspec.Struct):
    """The demo's figures; the keys of its JSON."""

    accuracy: float
    epochs: int
    steps: int
    ranks: int
    dataset_bytes: int
    hot_capacity_bytes: int
    cold_bytes_fetched: int
    fetches: int
    evictions: int
    killed_at_step: int
    resumed_from_step: int
    batches_identical_to_uninterrupted_run: bool
    samples_lost: int
    samples_repeated: int
    checkpoint_blocked_ms_p50: float
    checkpoints_committed: int
    stock_torch_can_read: bool
    wall_s: float


def read_log(path: Path) -> list[Step]:
    """Lines of a log; a last one cut short by SIGKILL is no step."""
    lines = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=Step) for line in lines[:-1]]
