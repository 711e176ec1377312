"""torch.distributed.checkpoint through checkpointd: `dcp.save` blocks for the copy only.

    writer = ForebayWriter("my-run", upstream="s3://bucket/checkpoints")
    dcp.save({"model": model, "optimizer": optimizer}, storage_writer=writer, checkpoint_id="100")
    dcp.load({"model": model, "optimizer": optimizer}, storage_reader=ForebayReader("my-run", upstream=...))

Each rank's tensors go into one safetensors file with the sharding information of torch's own
HuggingFaceStorageWriter, so that stock torch reads the directory with HuggingFaceStorageReader.
What is no tensor is kept as plain JSON in the file's metadata, never as a pickle; torch's planner
is given a pickle made here, from that JSON, at loading.

StorageWriter and StorageReader are implemented directly: torch 2.13's FileSystemWriter loses the
exceptions of its threads and replaces `.metadata` unsafely.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from forebay.checkpointd.container import OpenContainer, lay_out
from forebay.checkpointd.handover import Handover, SaveHandle, Target
from forebay.checkpointd.layout import check_run
from forebay.checkpointd.state import Flattened, unflatten
from forebay.core.channel import Channel
from forebay.core.config import Settings
from forebay.core.errors import InvalidRequest, UnsupportedValue
from forebay.core.protocol import (
    About,
    AttemptStatus,
    Checkpoint,
    CheckpointOpened,
    FileReady,
    Keep,
    Level,
    OpenCheckpoint,
    OpenFile,
)

# Names that torch's HuggingFaceStorageReader looks for (torch/distributed/checkpoint/_hf_utils.py).
_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_OBJECTS = "forebay_objects"
_READ_S = 3600.0


# An attempt is named by the coordinator's process and the number of the save, which all ranks count alike.
# torch may hand out plans of earlier saves again (enable_plan_caching), to some ranks and not to others,
# and keeps them per process: so nothing that changes from save to save can be in a plan.
_session = secrets.token_hex(10)
_saves = itertools.count(1)


def _step_of(checkpoint_id: str | os.PathLike[str] | None, default: int | None) -> int | None:
    if checkpoint_id is None:
        return default
    text = os.fspath(checkpoint_id).rpartition("/")[2].removeprefix("step-")
    if not text.isdecimal():
        raise InvalidRequest(f"checkpoint_id {checkpoint_id!r} is no step", hint='pass a number, as "100"')
    return int(text)


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
        self.step = _step_of(checkpoint_id, self.step)

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
        return os.fspath(checkpoint_id).rpartition("/")[2].removeprefix("step-").isdecimal()


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
            offsets[name] = {_OFFSETS: at}
            size_bytes = tensor.numel() * tensor.element_size()
        results.append(WriteResult(item.index, size_bytes, None))
    metadata = {_SHARDING: json.dumps(offsets), _OBJECTS: json.dumps(objects), "DCP_VERSION": "1.0"}
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


class ForebayReader(StorageReader):
    """For `dcp.load(..., storage_reader=reader)`; the newest valid checkpoint, or that of `step`.

    Any number of ranks may read what any other number wrote: DCP reshards.
    """

    def __init__(self, run: str, *, upstream: str | None = None, step: int | None = None) -> None:
        self.run = check_run(run)
        self.upstream = upstream
        self.step = step
        self.checkpoint: Checkpoint | None = None
        self._files: dict[str, OpenContainer] = {}
        self._places: dict[MetadataIndex, tuple[str, str]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.step = _step_of(checkpoint_id, self.step)
        self._files = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """From COMMIT.json and the files' own headers; each file's digest has been checked."""
        self._open_files()
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places: dict[MetadataIndex, tuple[str, str]] = {}
        for file, container in self._files.items():
            for fqn in json.loads(container.metadata[_OBJECTS]):
                entries[fqn] = BytesStorageMetadata()
                places[MetadataIndex(fqn)] = (file, fqn)
            sharding = json.loads(container.metadata[_SHARDING])
            for name in container.names:
                fqn = name.partition("#")[0]
                offset = torch.Size(sharding[name][_OFFSETS])
                _add_chunk(entries, fqn, offset, container, name)
                places[MetadataIndex(fqn, offset)] = (file, name)
        return Metadata(state_dict_metadata=dict(entries), storage_data=places)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._places = metadata.storage_data
        if not self._files:
            self._open_files()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            file, name = self._places[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(self._files[file], name))
            else:
                _read_slice(self._files[file], name, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return ForebayWriter.validate_checkpoint_id(checkpoint_id)

    def _open_files(self) -> None:
        with Channel.connect(Settings.load().checkpoint_socket, "trainer") as channel:
            request = OpenCheckpoint(self.run, self.upstream, self.step, verify=True)
            opened, _ = channel.request(request, expect=CheckpointOpened, timeout_s=_READ_S)
            self.checkpoint = opened.checkpoint
            for name in [file.name for file in opened.files]:
                ask_file = OpenFile(self.run, opened.checkpoint.step, opened.checkpoint.attempt, name)
                _, (fd,) = channel.request(ask_file, expect=FileReady, timeout_s=_READ_S)
                try:
                    self._files[name] = OpenContainer(fd, name)
                finally:
                    os.close(fd)


def _add_chunk(
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata],
    fqn: str,
    offset: torch.Size,
    container: OpenContainer,
    name: str,
) -> None:
    shape = torch.Size(container.slice(name).get_shape())
    end = [start + length for start, length in zip(offset, shape, strict=True)]
    known = entries.get(fqn)
    if not isinstance(known, TensorStorageMetadata):
        dtype = container.dtype(name)
        known = entries[fqn] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(end), [])
    known.chunks.append(ChunkStorageMetadata(offset, shape))
    known.size = torch.Size(max(a, b) for a, b in zip(known.size, end, strict=True))


def _read_slice(container: OpenContainer, name: str, item: ReadItem, planner: LoadPlanner) -> None:
    """Only the part that this rank needs is read: resharding costs no more than that."""
    part = tuple(
        slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True)
    )
    source = container.slice(name)[part] if part else container.tensor(name)
    target = planner.resolve_tensor(item).detach()
    target.copy_(source)
    planner.commit_tensor(item, target)


def _pickled(container: OpenContainer, fqn: str) -> io.BytesIO:
    """torch's planner unpickles what a reader gives it: give it a pickle made here and now."""
    skeleton = json.loads(container.metadata[_OBJECTS])[fqn]
    no_tensors: Mapping[str, torch.Tensor] = {}
    stream = io.BytesIO()
    torch.save(unflatten(skeleton, no_tensors), stream)
    stream.seek(0)
    return stream
