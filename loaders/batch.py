"""Samples and batches out of mapped shards. Where values lie as bytes or rows, one copy makes the batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from forebay.core.errors import ForebayError
from forebay.loaders.collate import Sample, collate, collate_column, signed
from forebay.loaders.decode import Decoder, array, as_it_is, decode_field
from forebay.loaders.order import Ints
from forebay.loaders.pool import BatchPool
from forebay.loaders.session import MappedShard

log = logging.getLogger("forebay.loaders")

KEY = "__key__"
OnSampleError = Literal["raise", "skip", "substitute"]
Shards = Mapping[int, MappedShard]
# The first ones are logged each, later ones now and then.
_LOGGED_EACH, _LOGGED_EVERY = 10, 1000


@dataclass(frozen=True)
class Cut:
    """What samples of a dataset are made of: fields with their decoders, and what is made of all of them."""

    fields: tuple[tuple[str, Decoder], ...]
    transform: Callable[[Sample], Sample] | None


class SampleReader:
    """What is made of rows of (shard, sample), by the `Cut` of each shard's dataset. Thread-safe."""

    def __init__(self, cuts: Sequence[Cut], on_error: OnSampleError) -> None:
        self._cuts = cuts
        # Columns can be gathered where all samples are made alike, of what lies in the shards.
        self._alike = on_error == "raise" and all(
            cut.fields == cuts[0].fields and cut.transform is None for cut in cuts
        )
        self._on_error = on_error
        self._lock = threading.Lock()
        self.failed = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def batch(self, rows: Ints, shards: Shards, pool: BatchPool) -> Sample:
        """In columns; the same values as `collate(samples(...))`, without the detour where it pays."""
        if not self._alike:
            return collate(self.samples(rows, shards), pool)
        return tuple(self._column(*field, rows, shards, pool) for field in self._cuts[0].fields)

    def samples(self, rows: Ints, shards: Shards) -> list[Sample]:
        """Decoded and transformed. Raises MissingField, FormatError, what the transform raises."""
        found: list[Sample | None] = []
        error: Exception | None = None
        for number, sample in rows.tolist():
            try:
                found.append(self._sample(shards[number], sample))
            except Exception as err:
                if self._on_error == "raise":
                    raise
                self._count(err)
                error = err
                found.append(None)
        good = [sample for sample in found if sample is not None]
        if error and not good:
            raise error
        return good if self._on_error == "skip" else _substituted(found)

    def _sample(self, shard: MappedShard, sample: int) -> Sample:
        cut = self._cuts[shard.part]
        values = tuple(_value(field, decoder, shard, sample) for field, decoder in cut.fields)
        if cut.transform is None:
            return values
        try:
            return cut.transform(values)
        except Exception as err:
            err.add_note(f"in the transform of sample {shard.samples.key(sample)!r} of {shard.name}")
            raise

    def _count(self, err: Exception) -> None:
        with self._lock:
            self.failed += 1
            number = self.failed
        if number <= _LOGGED_EACH or number % _LOGGED_EVERY == 0:
            said = str(err) if isinstance(err, ForebayError) else "; ".join([repr(err), *_notes(err)])
            log.warning("sample left out (the %d. so far, on_error=%s): %s", number, self._on_error, said)

    def _column(self, field: str, decoder: Decoder, rows: Ints, shards: Shards, pool: BatchPool) -> Any:
        gathered = None
        if field != KEY and decoder is array:
            gathered = _gather_bytes(field, rows, shards, pool)
        elif field != KEY and decoder is as_it_is:
            gathered = _gather_rows(field, rows, shards, pool)
        if gathered is not None:
            return gathered
        return collate_column(list(_values(field, decoder, rows, shards)), pool)


def _notes(err: Exception) -> list[str]:
    return list(getattr(err, "__notes__", []))


def _substituted(found: Sequence[Sample | None]) -> list[Sample]:
    """For each that failed the next good one of the batch."""
    good = next(sample for sample in found if sample is not None)
    whole = list[Sample]()
    for sample in reversed(found):
        good = good if sample is None else sample
        whole.append(good)
    return whole[::-1]


def _values(field: str, decoder: Decoder, rows: Ints, shards: Shards) -> Iterator[Any]:
    for number, sample in rows.tolist():
        yield _value(field, decoder, shards[number], sample)


def _value(field: str, decoder: Decoder, shard: MappedShard, sample: int) -> Any:
    if field == KEY:
        return shard.samples.key(sample)
    value = shard.samples.value(sample, field)
    if decoder is as_it_is:
        return value
    return decode_field(decoder, value, field, shard.samples.key(sample), shard.name)


def _gather_bytes(
    field: str, rows: Ints, shards: Shards, pool: BatchPool
) -> torch.Tensor | list[torch.Tensor] | None:
    """Bytes straight from the mapped shards into the batch: one copy, without the GIL."""
    places = dict[int, tuple[npt.NDArray[np.uint8], list[int], list[int]]]()
    for number in set(rows[:, 0].tolist()):
        spans = shards[number].samples.spans(field)
        if spans is None:
            return None
        places[number] = shards[number].file.array, *spans
    slices = []
    for number, sample in rows.tolist():
        source, offsets, sizes = places[number]
        offset = offsets[sample]
        if offset < 0:
            return None
        slices.append(source[offset : offset + sizes[sample]])
    if len(set(map(len, slices))) != 1:
        return [array(value) for value in slices]
    batch = pool.empty((len(slices), len(slices[0])), torch.uint8)
    np.concatenate(slices, out=batch.numpy().reshape(-1))
    return batch


def _gather_rows(field: str, rows: Ints, shards: Shards, pool: BatchPool) -> torch.Tensor | None:
    """Rows of arrays, shard by shard: one copy, which widens what torch cannot hold."""
    arrays = dict[int, npt.NDArray[Any]]()
    for number in set(rows[:, 0].tolist()):
        found = shards[number].samples.rows(field)
        if found is None:
            return None
        arrays[number] = found
    kinds = {(found.dtype, found.shape[1:]) for found in arrays.values()}
    if len(kinds) != 1:
        return None
    dtype, shape = kinds.pop()
    batch = pool.empty((len(rows), *shape), torch.from_numpy(np.empty(0, signed(dtype))).dtype)
    np.stack([arrays[number][sample] for number, sample in rows.tolist()], out=batch.numpy())
    return batch
