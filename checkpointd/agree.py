"""What the ranks of a job agree on, through torch.distributed when it is initialised."""

from __future__ import annotations

import secrets
from typing import Any

import torch.distributed as dist

from forebay.core.errors import InvalidRequest


def together() -> bool:
    """There are several ranks, and they can talk."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): as given, else torch.distributed's, else (0, 1)."""
    known = dist.is_available() and dist.is_initialized()
    own = dist.get_rank() if known else 0
    size = dist.get_world_size() if known else 1
    return own if rank is None else rank, size if world_size is None else world_size


def session(world_size: int) -> str:
    """One name for this start of the job. Raises InvalidRequest when the ranks cannot agree on it."""
    own = secrets.token_hex(6)
    if world_size == 1:
        return own
    if not together():
        raise InvalidRequest(
            f"{world_size} ranks, but torch.distributed is not initialised",
            hint="initialise it first, or pass the same new session= on every rank",
        )
    agreed: str = broadcast(own)
    return agreed


def broadcast(value: Any) -> Any:
    """Rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank; of one alone when there are no others."""
    if not together():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
