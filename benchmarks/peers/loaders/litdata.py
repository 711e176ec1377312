"""litdata: its own chunks, streamed from a local directory. https://github.com/Lightning-AI/litdata"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forebay.benchmarks.loads import Load, decoded, members


def batches(load: Load, files: Path, room: Path, batch_size: int, workers: int) -> Iterable[Any] | None:
    import litdata
    from litdata.streaming.writer import BinaryWriter

    if load.is_tokens:
        # Its windows do not overlap: other samples.
        return None
    folder = room / "litdata"
    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    for number, value in enumerate(members(files)):
        writer[number] = {load.field: value}
    writer.done()
    writer.merge(1)

    class Decoded(litdata.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return decoded(super().__getitem__(index)[load.field])

    kind = Decoded if load.is_image else litdata.StreamingDataset
    dataset = kind(str(folder), shuffle=True)
    loader = litdata.StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers)
    if load.is_image:
        return loader  # type: ignore[no-any-return]
    return _Field(loader, load.field)


class _Field:
    """Of batches that are dicts."""

    def __init__(self, loader: Iterable[Any], field: str) -> None:
        self._loader = loader
        self._field = field

    def __iter__(self) -> Any:
        return (batch[self._field] for batch in self._loader)
