"""Other loaders on the same bytes, each as its own documentation sets it up to be fast."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

from forebay.benchmarks.loads import IMAGE_SIDE, TOKENS, Load
from forebay.loaders import Resized

# JPEG -> uint8, (3, side, side): the decoder that all loaders share here.
decoded = Resized(IMAGE_SIDE, IMAGE_SIDE)


def webdataset(load: Load, files: Path, batch_size: int, workers: int) -> Iterable[Any]:
    """Undecoded: lists of bytes, its fastest form. Images: decoded and resized in its workers."""
    import webdataset as wds

    urls = [str(path) for path in sorted(files.glob("*.tar"))]
    dataset = wds.WebDataset(urls, shardshuffle=False, empty_check=False).to_tuple(load.field)
    if load.is_image:
        dataset = dataset.map_tuple(decoded)
    return wds.WebLoader(dataset.batched(batch_size), batch_size=None, num_workers=workers)  # type: ignore[no-any-return]


class _Memmap(torch.utils.data.Dataset[torch.Tensor]):
    """As training scripts for language models read their ids."""

    def __init__(self, files: Path) -> None:
        self._parts = [np.memmap(path, dtype=np.uint16, mode="r") for path in sorted(files.glob("*.bin"))]
        self._each = (len(self._parts[0]) - 1) // TOKENS

    def __len__(self) -> int:
        return self._each * len(self._parts)

    def __getitem__(self, number: int) -> torch.Tensor:
        part, place = divmod(number, self._each)
        ids = self._parts[part][place * TOKENS : place * TOKENS + TOKENS + 1]
        return torch.from_numpy(ids.astype(np.int64))


def torch_memmap(load: Load, files: Path, batch_size: int, workers: int) -> Iterable[Any]:
    return torch.utils.data.DataLoader(
        _Memmap(files), batch_size, shuffle=True, num_workers=workers, persistent_workers=True
    )
