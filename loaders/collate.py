"""From samples to a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from forebay.loaders.pool import BatchPool

Sample = tuple[Any, ...]


def collate(samples: Sequence[Sample], pool: BatchPool | None = None) -> Sample:
    """Columns of a batch: numbers and arrays of one shape become tensors, the rest stays a list."""
    return tuple(collate_column(values, pool) for values in zip(*samples, strict=True))


@dataclass(frozen=True)
class Padded:
    """As `collate`; tensors that differ in their first dimension are padded to the longest, with `value`.

    Such a column becomes a pair: the tensor (batch, longest, ...) and the lengths (batch,).
    """

    value: float = 0.0

    def __call__(self, samples: Sequence[Sample]) -> Sample:
        return tuple(self._column(column) for column in collate(samples))

    def _column(self, values: Any) -> Any:
        if not _are_tensors(values):
            return values
        padded = pad_sequence(values, batch_first=True, padding_value=self.value)
        return padded, torch.tensor([len(value) for value in values])


@dataclass(frozen=True)
class Ragged:
    """As `collate`; tensors that differ in their first dimension lie one behind the other.

    Such a column becomes a pair: the tensor (all lengths together, ...) and offsets (batch + 1,), as
    torch.nested and attention kernels for variable lengths take them.
    """

    def __call__(self, samples: Sequence[Sample]) -> Sample:
        return tuple(self._column(column) for column in collate(samples))

    def _column(self, values: Any) -> Any:
        if not _are_tensors(values):
            return values
        lengths = torch.tensor([0, *(len(value) for value in values)])
        return torch.cat(values), lengths.cumsum(0)


def collate_column(values: Sequence[Any], pool: BatchPool | None = None) -> Any:
    first = values[0]
    if isinstance(first, bool | int | float):
        return torch.tensor(values)
    if isinstance(first, np.ndarray | np.generic):
        values = [tensor_of(value) for value in values]
        first = values[0]
    if isinstance(first, torch.Tensor) and all(
        value.shape == first.shape and value.dtype == first.dtype for value in values
    ):
        return pool.stack(values) if pool else torch.stack(list(values))
    return list(values)


def tensor_of(array: npt.NDArray[Any] | np.generic) -> torch.Tensor:
    """A copy: what a format hands out may lie in a shard, which nobody may write to."""
    return torch.from_numpy(np.array(array, dtype=signed(array.dtype)))


def signed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """torch has little use for unsigned numbers wider than a byte: they become int64."""
    return np.dtype(np.int64) if dtype.kind == "u" and dtype.itemsize > 1 else dtype.newbyteorder("=")


def _are_tensors(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(
        isinstance(value, torch.Tensor) and value.ndim for value in values
    )  # fmt: skip
