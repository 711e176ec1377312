"""torchdata.nodes: batches of samples, mapped by threads. https://meta-pytorch.org/data

It has no reader of tar files: members are found ahead, and read from mapped files.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.benchmarks.loads import Load, decoded
from forebay.benchmarks.peers.loaders.memmap import Windows


class _Members:
    def __init__(self, files: Path) -> None:
        paths = sorted(files.glob("*.tar"))
        self._shards = [np.memmap(path, dtype=np.uint8, mode="r") for path in paths]
        self._places = []
        for number, path in enumerate(paths):
            with tarfile.open(path) as tar:
                self._places += [(number, member.offset_data, member.size) for member in tar]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Any:
        shard, offset, size_bytes = self._places[number]
        return self._shards[shard][offset : offset + size_bytes]


def batches(load: Load, files: Path, room: Path, batch_size: int, workers: int) -> Iterable[Any] | None:
    from torchdata import nodes

    samples: Any = Windows(files) if load.is_tokens else _Members(files)

    def collate(numbers: list[int]) -> torch.Tensor:
        found = [samples[number] for number in numbers]
        if load.is_image:
            return torch.stack([decoded(value.data) for value in found])
        return torch.stack(found) if load.is_tokens else torch.from_numpy(np.stack(found))

    sampler = torch.utils.data.RandomSampler(range(len(samples)))
    numbers = nodes.Batcher(nodes.SamplerWrapper(sampler), batch_size)
    mapped = nodes.ParallelMapper(numbers, collate, num_workers=workers, method="thread")
    return nodes.Loader(mapped)  # type: ignore[no-any-return]
