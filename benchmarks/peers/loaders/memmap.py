"""torch's own DataLoader over mapped files of ids, as training scripts for language models read them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

from forebay.benchmarks.loads import TOKENS, Load


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, files: Path) -> None:
        self._parts = [np.memmap(path, dtype=np.uint16, mode="r") for path in sorted(files.glob("*.bin"))]
        self._each = (len(self._parts[0]) - 1) // TOKENS

    def __len__(self) -> int:
        return self._each * len(self._parts)

    def __getitem__(self, number: int) -> torch.Tensor:
        part, place = divmod(number, self._each)
        ids = self._parts[part][place * TOKENS : place * TOKENS + TOKENS + 1]
        return torch.from_numpy(ids.astype(np.int64))


def batches(load: Load, files: Path, room: Path, batch_size: int, workers: int) -> Iterable[Any] | None:
    if not load.is_tokens:
        return None
    return torch.utils.data.DataLoader(
        Windows(files), batch_size, shuffle=True, num_workers=workers, persistent_workers=True
    )
