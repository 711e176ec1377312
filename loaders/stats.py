"""What a loader has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.loaders.pacing.lockstep import Lockstep


@dataclass
class LoaderStats:
    """Of this rank. `padded` counts samples that were repeated to give every rank an equal last batch,
    `failed` those that `on_error` left out or replaced.

    `lockstep` says how all ranks keep together, as of the last look.
    """

    batches: int = 0
    samples: int = 0
    padded: int = 0
    failed: int = 0
    wait_s: float = 0.0
    longest_wait_s: float = 0.0
    lockstep: Lockstep = field(default_factory=Lockstep)

    def waited(self, seconds: float) -> None:
        self.wait_s += seconds
        self.longest_wait_s = max(self.longest_wait_s, seconds)

    def looked(self, lockstep: Lockstep) -> None:
        self.lockstep = lockstep
