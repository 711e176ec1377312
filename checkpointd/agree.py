"""What the ranks of a job agree on, through torch.distributed when it is initialised."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from forebay.core.errors import InvalidRequest


@dataclass(frozen=True)
class Ranks:
    """Those that act together: `group` of torch.distributed, all ranks when None; or this process `alone`."""

    group: dist.ProcessGroup | None = None
    alone: bool = False

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self._can_talk else 0

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group) if self._can_talk else 1

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def _can_talk(self) -> bool:
        return not self.alone and dist.is_available() and dist.is_initialized()

    def broadcast(self, value: Any) -> Any:
        """The first rank's value on every rank."""
        if not self.several:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if not self.several:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def session(self, world_size: int) -> str:
        """One name for this start of the job. Raises InvalidRequest when the ranks cannot agree on it."""
        if world_size > 1 and not self.several:
            raise InvalidRequest(
                f"{world_size} ranks, but torch.distributed is not initialised",
                hint="initialise it first, or pass the same new session= on every rank",
            )
        own = secrets.token_hex(6)
        return own if world_size == 1 else str(self.broadcast(own))
