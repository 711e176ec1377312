"""checkpointd, and the trainer's side of it.

from forebay.checkpointd import Checkpointer

checkpoints = Checkpointer("my-run", upstream="s3://bucket/checkpoints")
checkpoints.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.core.protocol import Keep

if TYPE_CHECKING:
    from forebay.checkpointd.client import Checkpointer, SaveHandle
    from forebay.checkpointd.dcp import ForebayReader, ForebayWriter

__all__ = ["Checkpointer", "ForebayReader", "ForebayWriter", "Keep", "SaveHandle"]


def __getattr__(name: str) -> Any:
    """Lazily: the daemon imports this package and must not pay for torch."""
    if name in ("Checkpointer", "SaveHandle"):
        from forebay.checkpointd import client

        return getattr(client, name)
    if name in ("ForebayReader", "ForebayWriter"):
        from forebay.checkpointd import dcp

        return getattr(dcp, name)
    raise AttributeError(name)
