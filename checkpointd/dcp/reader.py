"""`dcp.load` through checkpointd: any number of ranks reads what any other number wrote.

First the ranks agree on a checkpoint (C4): each has its share of the files brought to its node and
compared byte by byte, and tells the others what their headers say. Then each rank has those files
brought that its part of the plan lies in; on as many ranks as have saved that is mostly its share.
"""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from forebay.checkpointd.agree import Ranks
from forebay.checkpointd.container import OpenContainer, Slot
from forebay.checkpointd.dcp.names import OBJECTS, OFFSETS, SHARDING, is_step, step_of
from forebay.checkpointd.layout import check_run, rank_file
from forebay.checkpointd.load import read_head
from forebay.checkpointd.reader import READ_S, Reader
from forebay.checkpointd.state import unflatten
from forebay.core.channel import Channel
from forebay.core.config import Settings
from forebay.core.errors import ForebayError, InvalidRequest
from forebay.core.protocol import (
    Checkpoint,
    CheckpointFile,
    CheckpointOpened,
    FileReady,
    OpenCheckpoint,
    OpenFile,
)


@dataclass(frozen=True)
class _Head:
    """What a file says of itself; `offsets` of each slot in the whole tensor, by the slot's name."""

    file: str
    slots: list[Slot]
    offsets: dict[str, list[int]]
    objects: dict[str, Any]


class ForebayReader(StorageReader):
    """For `dcp.load(..., storage_reader=reader)`; the newest valid checkpoint, or that of `step`.

    Loading is a collective: of `process_group` when `dcp.load` is given one, of this process alone when
    it is given `no_dist=True`; pass the same here.
    """

    def __init__(
        self,
        run: str,
        *,
        upstream: str | None = None,
        step: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        self.run = check_run(run)
        self.upstream = upstream
        self.step = step
        self.checkpoint: Checkpoint | None = None
        self._ranks = Ranks(process_group, no_dist)
        self._reader = Reader(Settings.load(), self.run, upstream, self._ranks)
        self._opened = ExitStack()
        self._channel: Channel | None = None
        self._share: set[str] = set()
        self._objects: dict[str, Any] = {}
        self._places: dict[MetadataIndex, tuple[str, str]] = {}
        # Found damaged when it was too late to take another: the next load passes over it.
        self._bad: dict[str, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.step = step_of(checkpoint_id, self.step)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """From the files' headers; each file has been compared with its digest by one of the ranks.

        Raises NoCheckpoint. (If `options` were called `kwargs`, torch would ask again after an error.)
        """
        self._close()
        for bad in self._ranks.gather(self._bad):
            self._bad.update(bad)
        heads = self._reader.agreed(self._connected, self.step, [], self._bad, self._take)
        everybody = [head for share in self._ranks.gather(heads) for head in share]
        self._objects = {fqn: skeleton for head in everybody for fqn, skeleton in head.objects.items()}
        return _describe(everybody)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises CheckpointCorrupt when a file that this rank needs is damaged wherever this node finds it;
        the next load passes over that checkpoint.
        """
        try:
            wanted = defaultdict[str, list[tuple[str, ReadItem]]](list)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _pickled(self._objects[item.storage_index.fqn]))
                else:
                    file, name = self._places[item.storage_index]
                    wanted[file].append((name, item))
            self._bring(wanted.keys() - self._share)
            for file, items in wanted.items():
                self._fill(file, items, planner)
        except ForebayError as err:
            self._bad[self._taken.attempt] = str(err)
            raise
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_step(checkpoint_id)

    @property
    def _taken(self) -> Checkpoint:
        assert self.checkpoint is not None
        return self.checkpoint

    def _connected(self) -> Channel:
        """One until the load is over: it holds what was chosen against retention (C5)."""
        if self._channel is None:
            self._channel = self._opened.enter_context(self._reader.connect())
        return self._channel

    def _close(self) -> None:
        self._opened.close()
        self._channel = None

    def _take(self, checkpoint: Checkpoint) -> list[_Head]:
        """This rank's share of the files, whole on this node; what their headers say."""
        self.checkpoint = checkpoint
        share = [rank_file(number) for number in range(checkpoint.world_size)]
        files = self._bring(share[self._ranks.rank :: self._ranks.size])
        self._share = {file.name for file in files}
        return [self._head(file) for file in files]

    def _bring(self, names: Collection[str]) -> list[CheckpointFile]:
        """They lie in this node's spool afterwards, right in every byte. Raises InvalidRequest."""
        if not names:
            return []
        at = self._taken
        request = OpenCheckpoint(self.run, self.upstream, at.step, at.attempt, sorted(names), verify=True)
        opened, _ = self._connected().request(request, expect=CheckpointOpened, timeout_s=READ_S)
        if len(opened.files) != len(request.names or ()):
            raise InvalidRequest(f"step {at.step} of {self.run} comes from a watched folder, not from ranks")
        return opened.files

    @contextmanager
    def _file(self, name: str) -> Iterator[int]:
        request = OpenFile(self.run, self._taken.step, self._taken.attempt, name)
        _, (fd,) = self._connected().request(request, expect=FileReady, timeout_s=READ_S)
        try:
            yield fd
        finally:
            os.close(fd)

    def _head(self, file: CheckpointFile) -> _Head:
        with self._file(file.name) as fd:
            _, slots, metadata = read_head(fd, 0, file)
        if SHARDING not in metadata:
            raise InvalidRequest(
                f"step {self._taken.step} of {self.run} was not saved through torch.distributed.checkpoint",
                hint="restore it with Checkpointer",
            )
        offsets = {name: at[OFFSETS] for name, at in json.loads(metadata[SHARDING]).items()}
        return _Head(file.name, slots, offsets, json.loads(metadata[OBJECTS]))

    def _fill(self, file: str, items: Sequence[tuple[str, ReadItem]], planner: LoadPlanner) -> None:
        with self._file(file) as fd:
            container = OpenContainer(fd, file)
        for name, item in items:
            _read_slice(container, name, item, planner)


def _describe(heads: Sequence[_Head]) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, tuple[str, str]] = {}
    for head in heads:
        entries |= {fqn: BytesStorageMetadata() for fqn in head.objects}
        for slot in head.slots:
            fqn = slot.name.partition("#")[0]
            offset = torch.Size(head.offsets[slot.name])
            _add_chunk(entries, fqn, offset, slot)
            places[MetadataIndex(fqn, offset)] = (head.file, slot.name)
    return Metadata(state_dict_metadata=dict(entries), storage_data=places)


def _add_chunk(
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata], fqn: str, offset: torch.Size, slot: Slot
) -> None:
    shape = torch.Size(slot.shape)
    end = [start + length for start, length in zip(offset, shape, strict=True)]
    known = entries.get(fqn)
    if not isinstance(known, TensorStorageMetadata):
        known = entries[fqn] = TensorStorageMetadata(TensorProperties(slot.dtype), torch.Size(end), [])
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


def _pickled(skeleton: Any) -> io.BytesIO:
    """torch's planner unpickles what a reader gives it: give it a pickle made here and now."""
    no_tensors: Mapping[str, torch.Tensor] = {}
    stream = io.BytesIO()
    torch.save(unflatten(skeleton, no_tensors), stream)
    stream.seek(0)
    return stream
