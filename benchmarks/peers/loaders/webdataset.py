"""webdataset. https://webdataset.github.io/webdataset"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forebay.benchmarks.loads import Load, decoded


def batches(load: Load, files: Path, room: Path, batch_size: int, workers: int) -> Iterable[Any] | None:
    """Undecoded: lists of bytes, its fastest form. Images: decoded and resized in its workers."""
    import webdataset as wds

    if load.is_tokens:
        return None
    urls = [str(path) for path in sorted(files.glob("*.tar"))]
    dataset = wds.WebDataset(urls, shardshuffle=False, empty_check=False).to_tuple(load.field)
    if load.is_image:
        dataset = dataset.map_tuple(decoded)
    return wds.WebLoader(dataset.batched(batch_size), batch_size=None, num_workers=workers)  # type: ignore[no-any-return]
