"""Pacing: every rank is measured, all ranks see it, and what makes them wait is named before it hurts.

meter     what this rank does: waits, work between them, bytes
board     what the ranks tell each other, through torch.distributed's store
lockstep  what the reports of all ranks mean together
monitor   the thread that does it, beside the training
"""

from __future__ import annotations

from forebay.loaders.pacing.lockstep import Lockstep
from forebay.loaders.pacing.monitor import Pacing

__all__ = ["Lockstep", "Pacing"]
