"""A rank's file into tensors: each byte is read once, by several threads, and digested on the way.

The file is safetensors; the bytes go to where the tensors lie, whether those are new or the trainer's own.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.checkpointd.container import Slot, parse_header
from forebay.core.errors import CheckpointCorrupt, DigestMismatch, InvalidRequest
from forebay.core.protocol import CheckpointFile
from forebay.tiers.digest import StreamDigest

_READERS = 2
_PIECE_BYTES = 8 << 20
# preadv(2) takes 1024 buffers at most.
_PIECE_BUFFERS = 512
_LARGE_BYTES = 4 << 20
_LONGEST_HEADER_BYTES = 256 << 20


@dataclass(frozen=True)
class Loaded:
    metadata: dict[str, str]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Into:
    """Tensors to be filled where they are; `strict`: exactly these must have been saved."""

    tensors: Mapping[str, torch.Tensor]
    strict: bool

    def check(self, slots: Sequence[Slot]) -> None:
        """Before a byte is read. Raises InvalidRequest."""
        if not self.strict:
            return
        saved = {slot.name: slot for slot in slots}
        problems = [f"{name} was not saved" for name in self.tensors.keys() - saved.keys()]
        for name, slot in saved.items():
            target = self.tensors.get(name)
            if target is None:
                problems.append(f"{name} was saved, `into` lacks it")
            elif (tuple(target.shape), target.dtype) != (slot.shape, slot.dtype):
                problems.append(
                    f"{name} is {target.dtype} {tuple(target.shape)}, saved was {slot.dtype} {slot.shape}"
                )
        if problems:
            raise InvalidRequest(
                f"`into` does not fit what was saved: {'; '.join(sorted(problems)[:5])}",
                hint="pass strict=False to fill what fits, or leave `into` away",
            )


@dataclass(frozen=True)
class _Piece:
    """Bytes that lie together in the file, wherever they go."""

    offset: int
    buffers: list[memoryview]
    size_bytes: int


def load(fd: int, offset: int, file: CheckpointFile, into: Into) -> Loaded:
    """The file that begins at `offset` of `fd`, in full.

    Raises InvalidRequest when `into` does not fit; DigestMismatch when the bytes are not those that were
    saved (what was filled is then undefined).
    """
    digest = StreamDigest()
    head, slots, metadata = read_head(fd, offset, file)
    digest.update(head)
    into.check(slots)
    tensors = {slot.name: _place(slot, into.tensors.get(slot.name)) for slot in slots}
    with ThreadPoolExecutor(_READERS, "forebay-load") as readers:
        reading: deque[tuple[_Piece, Future[None]]] = deque()
        for piece in _pieces(slots, tensors, offset + len(head)):
            reading.append((piece, readers.submit(_read, fd, piece, file.name)))
            if len(reading) > 2 * _READERS:
                _take(reading, digest)
        while reading:
            _take(reading, digest)
    if digest.size_bytes != file.size_bytes or digest.xxh3 != file.digest:
        raise DigestMismatch(f"{file.name} does not match its digest")
    for name, tensor in tensors.items():
        target = into.tensors.get(name)
        if target is not None and target is not tensor and target.shape == tensor.shape:
            target.copy_(tensor)
            tensors[name] = target
    return Loaded(metadata, tensors)


def _take(reading: deque[tuple[_Piece, Future[None]]], digest: StreamDigest) -> None:
    piece, done = reading.popleft()
    done.result()
    for buffer in piece.buffers:
        digest.update(buffer)


def read_head(fd: int, offset: int, file: CheckpointFile) -> tuple[bytes, list[Slot], dict[str, str]]:
    """Its bytes, the slots behind it, and the file's metadata. Raises DigestMismatch."""
    length = int.from_bytes(os.pread(fd, 8, offset), "little")
    if not 2 <= length <= min(file.size_bytes - 8, _LONGEST_HEADER_BYTES):
        raise DigestMismatch(f"{file.name} has no sound header")
    head = os.pread(fd, 8 + length, offset)
    try:
        slots, metadata = parse_header(head, file.size_bytes)
    except (ValueError, KeyError, TypeError, json.JSONDecodeError) as err:
        raise DigestMismatch(f"{file.name} has no sound header: {err}") from err
    return head, slots, metadata


def _place(slot: Slot, target: torch.Tensor | None) -> torch.Tensor:
    """The trainer's tensor, if it can be read into as it lies; else a new one."""
    if (
        target is not None
        and target.device.type == "cpu"
        and target.is_contiguous()
        and (target.dtype, tuple(target.shape)) == (slot.dtype, slot.shape)
    ):
        return target
    if slot.end - slot.start < _LARGE_BYTES:
        return torch.empty(slot.shape, dtype=slot.dtype)
    # NumPy asks the kernel for huge pages: a fifth of the time until all of them have been touched.
    raw = torch.from_numpy(np.empty(slot.end - slot.start, np.uint8))
    return raw.view(slot.dtype).view(slot.shape)


def _pieces(slots: list[Slot], tensors: Mapping[str, torch.Tensor], base: int) -> Iterator[_Piece]:
    """In order of the file, large tensors in parts, small ones together."""
    offset, buffers, size_bytes = base, list[memoryview](), 0
    for slot in slots:
        if slot.start == slot.end:
            continue
        if not buffers:
            offset = base + slot.start
        view = _bytes_of(tensors[slot.name])
        while view:
            part = view[: _PIECE_BYTES - size_bytes]
            view = view[len(part) :]
            buffers.append(part)
            size_bytes += len(part)
            if size_bytes == _PIECE_BYTES or len(buffers) == _PIECE_BUFFERS:
                yield _Piece(offset, buffers, size_bytes)
                offset, buffers, size_bytes = offset + size_bytes, [], 0
    if buffers:
        yield _Piece(offset, buffers, size_bytes)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _read(fd: int, piece: _Piece, name: str) -> None:
    got = os.preadv(fd, piece.buffers, piece.offset)
    while got < piece.size_bytes:
        # Rare: the kernel gave less than asked.
        more = os.preadv(fd, _after(piece.buffers, got), piece.offset + got)
        if not more:
            raise CheckpointCorrupt(f"{name} ends early")
        got += more


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    left = []
    for buffer in buffers:
        if done < len(buffer):
            left.append(buffer[done:])
        done = max(0, done - len(buffer))
    return left
