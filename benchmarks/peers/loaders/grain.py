"""grain: ArrayRecord files, read and mapped by threads. https://google-grain.readthedocs.io"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from forebay.benchmarks.loads import Load, decoded, members
from forebay.benchmarks.peers.loaders.memmap import Windows


def batches(load: Load, files: Path, room: Path, batch_size: int, workers: int) -> Iterable[Any] | None:
    import grain

    def pixels(value: bytes) -> Any:
        return decoded(value).numpy()

    def raw(value: bytes) -> Any:
        return np.frombuffer(value, np.uint8)

    if load.is_tokens:
        dataset = grain.MapDataset.source(Windows(files)).shuffle(seed=0).map(lambda ids: ids.numpy())
    else:
        source = grain.sources.ArrayRecordDataSource(_written(files, room / "grain"))
        dataset = grain.MapDataset.source(source).shuffle(seed=0).map(pixels if load.is_image else raw)
    options = grain.ReadOptions(num_threads=2 * workers, prefetch_buffer_size=4 * batch_size)
    return dataset.to_iter_dataset(options).batch(batch_size)  # type: ignore[no-any-return]


def _written(files: Path, folder: Path) -> list[str]:
    from array_record.python.array_record_module import ArrayRecordWriter

    folder.mkdir()
    path = str(folder / "samples.array_record")
    writer = ArrayRecordWriter(path, "group_size:1")
    for value in members(files):
        writer.write(value)
    writer.close()
    return [path]
