"""What a loader has done so far, for people and for the pacing monitor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LoaderStats:
    """`padded` counts samples that were repeated to give every rank an equal last batch, `failed` those that
    `on_error` left out or replaced.
    """

    batches: int = 0
    samples: int = 0
    padded: int = 0
    failed: int = 0
    wait_s: float = 0.0
    longest_wait_s: float = 0.0

    def waited(self, seconds: float) -> None:
        self.wait_s += seconds
        self.longest_wait_s = max(self.longest_wait_s, seconds)
