"""What a dataset is: an Arrow table of shards, frozen when it was listed.

Columns: key (string), size_bytes (int64), version (string), md5 (string, nullable). The file is
Arrow IPC, memory-mapped: millions of shards cost address space, not Python objects.
https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pyarrow as pa
import xxhash

from forebay.core.errors import EmptyDataset, InvalidRequest
from forebay.tiers.store import ObjectInfo, Store

SCHEMA = pa.schema(
    [("key", pa.string()), ("size_bytes", pa.int64()), ("version", pa.string()), ("md5", pa.string())]
)
# Which objects below a prefix belong to a dataset of that format; `raw` takes everything.
SUFFIXES = {"webdataset": (".tar",), "raw": ("",)}
_BATCH_ROWS = 65536


class Shard(msgspec.Struct, frozen=True):
    """One shard of a dataset. `id` names its bytes: another version is another id."""

    number: int
    url: str
    info: ObjectInfo
    id: str

    @property
    def size_bytes(self) -> int:
        return self.info.size_bytes

    @property
    def name(self) -> str:
        return f"{self.url}/{self.info.key}"


def object_id(url: str, info: ObjectInfo) -> str:
    """The whole name is hashed, so equal base names in two prefixes stay apart (F31)."""
    return xxhash.xxh3_128_hexdigest(f"{url}\0{info.key}\0{info.version}\0{info.size_bytes}".encode())


class Manifest:
    """A frozen listing, opened for reading."""

    def __init__(self, path: Path, url: str) -> None:
        self.path = path
        self.url = url
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self._table = table
        self.sizes_bytes: list[int] = table["size_bytes"].to_pylist()

    def __len__(self) -> int:
        return len(self.sizes_bytes)

    def shard(self, number: int) -> Shard:
        if not 0 <= number < len(self):
            raise InvalidRequest(f"{self.url} has shards 0 to {len(self) - 1}, not {number}")
        key, size_bytes, version, md5 = (column[number].as_py() for column in self._table.columns)
        info = ObjectInfo(key, size_bytes, version, md5)
        return Shard(number, self.url, info, object_id(self.url, info))


class Frozen(msgspec.Struct, frozen=True):
    """What `freeze` found out while it wrote the manifest."""

    path: Path
    fingerprint: str
    shards: int
    size_bytes: int
    largest_bytes: int


async def list_shards(store: Store, format: str, keys: list[str] | None) -> list[ObjectInfo]:
    """The shards of a dataset in order of their keys; given keys keep their own order.

    Raises EmptyDataset, ObjectNotFound, InvalidRequest for a format that nobody knows.
    """
    if format not in SUFFIXES:
        raise InvalidRequest(f"unknown format {format!r}", hint=f"one of {', '.join(sorted(SUFFIXES))}")
    if keys is not None:
        if len(set(keys)) != len(keys):
            raise InvalidRequest("a key is named twice in the list of shards")
        found = [await store.head(key) for key in keys]
    else:
        found = []
        others = 0
        async for info in store.list():
            if info.key.endswith(SUFFIXES[format]):
                found.append(info)
            else:
                others += 1
        if not found and others:
            raise EmptyDataset(
                f"{store.url} holds {others} objects, but none that ends in {SUFFIXES[format][0]}",
                hint="check the prefix and the format",
            )
    if not found:
        raise EmptyDataset(f"there is nothing under {store.url}")
    return sorted(found, key=lambda info: info.key) if keys is None else found


def freeze(infos: Iterable[ObjectInfo], folder: Path) -> Frozen:
    """Write the manifest; its file name is its fingerprint."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{secrets.token_hex(8)}"
    digest, shards, size_bytes, largest_bytes = xxhash.xxh3_128(), 0, 0, 0
    try:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            for rows in _batches(infos):
                for info in rows:
                    digest.update(f"{info.key}\0{info.size_bytes}\0{info.version}\0".encode())
                    shards, size_bytes = shards + 1, size_bytes + info.size_bytes
                    largest_bytes = max(largest_bytes, info.size_bytes)
                writer.write_batch(
                    pa.RecordBatch.from_pylist([msgspec.structs.asdict(i) for i in rows], SCHEMA)
                )
        path = folder / f"{digest.hexdigest()}.arrow"
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return Frozen(path, digest.hexdigest(), shards, size_bytes, largest_bytes)


def _batches(infos: Iterable[ObjectInfo]) -> Iterable[list[ObjectInfo]]:
    rows: list[ObjectInfo] = []
    for info in infos:
        rows.append(info)
        if len(rows) == _BATCH_ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


def default_name(url: str) -> str:
    """The last part of the URL: what a user would call it."""
    return os.path.basename(url.rstrip("/")) or url
