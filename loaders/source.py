"""What a DataLoader reads: one dataset, or a mixture of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from forebay.core.protocol import Dataset, RankState, Runway
from forebay.loaders.batch import SampleReader
from forebay.loaders.order import Cursor, Opener, Walk
from forebay.loaders.session import MappedShard


class Session(Protocol):
    """Connections to stagerd: see `StagerSession`, which is one for one dataset."""

    waits_for: str
    reconnecting: bool

    @property
    def dataset(self) -> Dataset: ...

    @property
    def shards(self) -> int: ...

    @property
    def socket(self) -> Path: ...

    @property
    def closed(self) -> bool: ...

    def size_bytes(self, shard: int) -> int: ...

    def open_plan(self, shards: Sequence[int], window: int) -> None: ...

    def need(self, shard: int, position: int | None = None) -> MappedShard: ...

    def advance(self, shard: int, position: int) -> None: ...

    def pace(self, keep_bytes: int | None, state: RankState | None = None) -> Runway: ...

    def counts(self) -> list[int]: ...

    def close(self) -> None: ...

    def __enter__(self) -> Session: ...

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Sequencing(Protocol):
    """See `Order`."""

    @property
    def seed(self) -> int: ...

    @property
    def shuffle(self) -> bool: ...

    @property
    def block_shards(self) -> int: ...

    @property
    def shards(self) -> int: ...

    @property
    def window(self) -> int: ...

    def walk(self, epoch: int, start: Cursor, opener: Opener) -> Walk: ...

    def count_samples(self, epoch: int, counts: Sequence[int]) -> int: ...

    def describe(self) -> str: ...


class Source(Protocol):
    """`single`: every shard is one sample. `signature`: how shards are cut into samples."""

    @property
    def reader(self) -> SampleReader: ...

    @property
    def single(self) -> bool: ...

    @property
    def signature(self) -> str: ...

    def open_session(self, dataset_id: str | None = None, socket: Path | None = None) -> Any: ...

    def order(self, session: Any, shuffle: bool, seed: int, shuffle_block: int | None) -> Sequencing: ...
