"""`dcp.save` through checkpointd: each rank's part of the plan becomes one file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from forebay.checkpointd.container import lay_out
from forebay.checkpointd.dcp.names import OBJECTS, OFFSETS, SHARDING, is_step, step_of
from forebay.checkpointd.handover import Handover, SaveHandle, Target
from forebay.checkpointd.layout import check_run
from forebay.checkpointd.state import Flattened
from forebay.core.config import Settings
from forebay.core.errors import InvalidRequest, UnsupportedValue
from forebay.core.protocol import About, AttemptStatus, Keep, Level

# An attempt is named by the coordinator's process and the number of the save, which all ranks count alike.
# torch may hand out plans of earlier saves again (enable_plan_caching), to some ranks and not to others,
# and keeps them per process: so nothing that changes from save to save can be in a plan.
_session = secrets.token_hex(10)
_saves = itertools.count(1)


class ForebayWriter(StorageWriter):
    """For `dcp.save(..., storage_writer=writer, checkpoint_id=step)`.

    One instance per run, kept from save to save: it owns the arenas. `wait()` tells when the last
    save is committed; the next save raises SaveFailed when it did not get there.
    """

    def __init__(
        self,
        run: str,
        *,
        upstream: str | None = None,
        step: int | None = None,
        keep: Keep | None = None,
        reuse: bool = False,
    ) -> None:
        """`keep` and `reuse` as in `Checkpointer`."""
        self.run = check_run(run)
        self.upstream = upstream
        self.step = step
        self._about = About(keep=keep or Keep(), reuse=reuse)
        self._rank = 0
        self._handover: Handover | None = None
        self._last: SaveHandle | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Arenas stay behind: a copy in another process makes its own."""
        return {**self.__dict__, "_handover": None, "_last": None}

    def wait(self, level: Level = "committed", timeout_s: float | None = None) -> AttemptStatus | None:
        return self._last.wait(level, timeout_s) if self._last else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.step = step_of(checkpoint_id, self.step)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        together = dist.is_available() and dist.is_initialized()
        self._rank = int(kwargs.get("rank", dist.get_rank() if together else 0))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The coordinator names the attempt; torch's own scatter of the plans tells everybody (C3)."""
        named = _Attempt(_session, len(plans))
        return [dataclasses.replace(plan, storage_data=named) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        number = next(_saves)
        if self.step is None:
            raise InvalidRequest("no step was given", hint='dcp.save(..., checkpoint_id="100")')
        tensors, metadata, results = _collect(plan, planner)
        container = lay_out(tensors, metadata)
        if self._handover is None:
            self._handover = Handover(Settings.load(), buffers=2)
        named: _Attempt = plan.storage_data
        attempt = f"{named.session}-{number:06d}"
        target = Target(
            self.run, self.step, attempt, self._rank, named.world_size, self.upstream, self._about
        )
        self._handover.report_failure()
        self._last = self._handover.send(target, container, tensors)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: the commit is the daemons' work, and comes when the bytes are upstream."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_step(checkpoint_id)


@dataclasses.dataclass(frozen=True)
class _Attempt:
    session: str
    world_size: int


def _collect(
    plan: SavePlan, planner: SavePlanner
) -> tuple[dict[str, torch.Tensor], dict[str, str], list[WriteResult]]:
    """The plan's tensors by name in the file, the file's metadata, and torch's results."""
    tensors: dict[str, torch.Tensor] = {}
    offsets: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    results = []
    for item in plan.items:
        size_bytes = 0
        if item.type == WriteItemType.BYTE_IO:
            objects[item.index.fqn] = _plain(planner, item)
        else:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor) and item.tensor_data is not None
            at = list(item.tensor_data.chunk.offsets)
            name = item.index.fqn
            if name in tensors:
                name = f"{name}#{','.join(map(str, at))}"
            tensors[name] = tensor.detach()
            offsets[name] = {OFFSETS: at}
            size_bytes = tensor.numel() * tensor.element_size()
        results.append(WriteResult(item.index, size_bytes, None))
    metadata = {SHARDING: json.dumps(offsets), OBJECTS: json.dumps(objects), "DCP_VERSION": "1.0"}
    return tensors, metadata, results


def _plain(planner: SavePlanner, item: WriteItem) -> Any:
    """An object as JSON, taken before torch pickles it."""
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise UnsupportedValue(
            f"{type(planner).__name__} hands out {item.index.fqn!r} as a pickle only",
            hint="use a planner derived from DefaultSavePlanner",
        )
    flat = Flattened(lookup(item.index))
    if flat.tensors:
        raise UnsupportedValue(f"{item.index.fqn!r} hides tensors in an object; put them in the state dict")
    return flat.skeleton
