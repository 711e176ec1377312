"""What a dataset is: an Arrow table of shards, frozen when it was listed.

Columns: key (string), size_bytes (int64), version (string), md5 (string, nullable), id (16 bytes).
The file is Arrow IPC, memory-mapped: millions of shards cost address space, not Python objects.
https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from anyio import to_thread

from forebay.core.errors import DatasetNotFound, InvalidRequest, ListingBroken
from forebay.tiers.store import ObjectInfo

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("size_bytes", pa.int64()),
        ("version", pa.string()),
        ("md5", pa.string()),
        ("id", pa.binary(16)),
    ]
)
_BATCH_ROWS = 16384
_PAGE_ROWS = 1024


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


def object_id(url: str, info: ObjectInfo) -> bytes:
    """The whole name is hashed, so equal base names in two prefixes stay apart (F31)."""
    return xxhash.xxh3_128_digest(f"{url}\0{info.key}\0{info.version}\0{info.size_bytes}".encode())


class Manifest:
    """A frozen listing, opened for reading."""

    def __init__(self, path: Path, url: str) -> None:
        self.path = path
        self.url = url
        try:
            self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (pa.ArrowInvalid, OSError) as err:
            raise DatasetNotFound(
                f"the manifest {path} cannot be read: {err}", hint="register the dataset again"
            ) from err

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def shard(self, number: int) -> Shard:
        if not 0 <= number < len(self):
            raise InvalidRequest(f"{self.url} has shards 0 to {len(self) - 1}, not {number}")
        key, size_bytes, version, md5, raw = (column[number].as_py() for column in self._table.columns)
        return Shard(number, self.url, ObjectInfo(key, size_bytes, version, md5), raw.hex())

    def shards(self, numbers: npt.NDArray[np.int64]) -> Iterator[Shard]:
        """Many at once, in pages: much cheaper than one by one."""
        for start in range(0, len(numbers), _PAGE_ROWS):
            page = numbers[start : start + _PAGE_ROWS]
            columns = [column.to_pylist() for column in self._table.take(pa.array(page)).columns]
            for number, key, size_bytes, version, md5, raw in zip(page.tolist(), *columns, strict=True):
                yield Shard(number, self.url, ObjectInfo(key, size_bytes, version, md5), raw.hex())

    def keys(self, numbers: npt.NDArray[np.int64]) -> list[str]:
        return self._table["key"].take(pa.array(numbers)).to_pylist()  # type: ignore[no-any-return]

    @cached_property
    def sizes_bytes(self) -> npt.NDArray[np.int64]:
        return self._table["size_bytes"].to_numpy()  # type: ignore[no-any-return]

    @cached_property
    def ids(self) -> npt.NDArray[np.uint64]:
        """The ids, one row of two words per shard: what can be searched without a Python object each."""
        rows = [np.frombuffer(chunk.buffers()[1], ">u8").reshape(-1, 2)[chunk.offset :][: len(chunk)]
                for chunk in self._table["id"].chunks]  # fmt: skip
        return np.concatenate(rows).astype(np.uint64)

    def number_of(self, object_id: str) -> int | None:
        """Which shard has that id; microseconds, whatever the size."""
        high, low = int(object_id[:16], 16), int(object_id[16:], 16)
        place = int(np.searchsorted(self._sorted_highs, np.uint64(high)))
        while place < len(self) and self._sorted_highs[place] == high:
            number = int(self._by_high[place])
            if self.ids[number, 1] == low:
                return number
            place += 1
        return None

    def numbers_of(self, object_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """The same for many at once; -1 for an id that is not here."""
        words = np.frombuffer(bytes.fromhex("".join(object_ids)), ">u8").reshape(-1, 2).astype(np.uint64)
        if not len(words) or not len(self):
            return np.full(len(words), -1, dtype=np.int64)
        places = np.minimum(np.searchsorted(self._sorted_highs, words[:, 0]), len(self) - 1)
        numbers = self._by_high[places]
        found: npt.NDArray[np.int64] = np.where((self.ids[numbers] == words).all(axis=1), numbers, -1)
        for place in np.flatnonzero((found < 0) & (self._sorted_highs[places] == words[:, 0])):
            # Two ids with one first half: looked for one by one.
            number = self.number_of(object_ids[int(place)])
            found[place] = -1 if number is None else number
        return found

    def find(self, key: str) -> int | None:
        """Which shard has that key: a search by halves where they are in order of keys."""
        column = self._table["key"]
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if column[middle].as_py() < key:
                low = middle + 1
            else:
                high = middle
        if low < len(self) and column[low].as_py() == key:
            return low
        number = pc.index(column, key).as_py()
        return None if number < 0 else int(number)

    @cached_property
    def _by_high(self) -> npt.NDArray[np.int64]:
        return np.argsort(self.ids[:, 0], kind="stable")

    @cached_property
    def _sorted_highs(self) -> npt.NDArray[np.uint64]:
        return self.ids[:, 0][self._by_high]


class Frozen(msgspec.Struct, frozen=True):
    """What `freeze` found out while it wrote the manifest."""

    path: Path
    fingerprint: str
    shards: int
    size_bytes: int
    largest_bytes: int


async def freeze(infos: AsyncIterator[ObjectInfo], url: str, folder: Path, *, by_key: bool) -> Frozen:
    """Write the manifest in batches; its file name is its fingerprint.

    With `by_key` the shards are put in order of their keys, else they stay as they come.
    Raises ListingBroken for a name that is given twice.
    """
    await to_thread.run_sync(lambda: folder.mkdir(parents=True, exist_ok=True))
    writer = _Writer(folder / f".{secrets.token_hex(8)}", url)
    try:
        rows: list[ObjectInfo] = []
        async for info in infos:
            rows.append(info)
            if len(rows) == _BATCH_ROWS:
                await to_thread.run_sync(writer.add, rows)
                rows = []
        await to_thread.run_sync(writer.add, rows)
        return await to_thread.run_sync(writer.publish, folder, by_key)
    finally:
        writer.close()


class _Writer:
    """The file under a temporary name, and what is counted while it grows."""

    def __init__(self, temporary: Path, url: str) -> None:
        self._temporary = temporary
        self._url = url
        self._sink = pa.OSFile(str(temporary), "wb")
        self._writer = pa.ipc.new_file(self._sink, SCHEMA)
        self._digest = xxhash.xxh3_128()
        self._shards = self._size_bytes = self._largest_bytes = 0
        self._in_order, self._last = True, ""

    def add(self, rows: list[ObjectInfo]) -> None:
        if not rows:
            return
        columns: list[list[Any]] = [
            [info.key for info in rows],
            [info.size_bytes for info in rows],
            [info.version for info in rows],
            [info.md5 for info in rows],
        ]
        with _utf8_keys(self._url, rows):
            columns.append([object_id(self._url, info) for info in rows])
            arrays = [pa.array(c, field.type) for c, field in zip(columns, SCHEMA, strict=True)]
        for key in columns[0]:
            self._in_order &= key > self._last
            self._last = key
        self._write(pa.record_batch(arrays, schema=SCHEMA))

    def _write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)
        # Names, sizes and versions in their order make the dataset, wherever it lies.
        for row in zip(*(batch[name].to_pylist() for name in ("key", "size_bytes", "version")), strict=True):
            self._digest.update("{}\0{}\0{}\0".format(*row).encode())
        self._shards += batch.num_rows
        self._size_bytes += pc.sum(batch["size_bytes"]).as_py()
        self._largest_bytes = max(self._largest_bytes, pc.max(batch["size_bytes"]).as_py())

    def publish(self, folder: Path, by_key: bool) -> Frozen:
        self._writer.close()
        self._sink.close()
        if by_key and not self._in_order:
            return self._sorted(folder)
        # The ids follow from the URL too, so equal listings of two places are two files.
        place = xxhash.xxh3_64_hexdigest(self._url.encode())
        path = folder / f"{self._digest.hexdigest()}-{place}.arrow"
        self._temporary.rename(path)
        return Frozen(path, self._digest.hexdigest(), self._shards, self._size_bytes, self._largest_bytes)

    def _sorted(self, folder: Path) -> Frozen:
        table = pa.ipc.open_file(pa.memory_map(str(self._temporary))).read_all().sort_by("key")
        keys = table["key"].combine_chunks()
        if len(keys) > 1 and (twice := pc.index(pc.equal(keys[1:], keys[:-1]), True).as_py()) >= 0:
            raise ListingBroken(f"{self._url} lists {keys[twice].as_py()!r} twice")
        writer = _Writer(self._temporary.with_name(f".{secrets.token_hex(8)}"), self._url)
        try:
            for batch in table.to_batches(_BATCH_ROWS):
                writer._write(batch)
            return writer.publish(folder, by_key=False)
        finally:
            writer.close()

    def close(self) -> None:
        self._sink.close()
        self._temporary.unlink(missing_ok=True)


@contextmanager
def _utf8_keys(url: str, rows: list[ObjectInfo]) -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as err:
        bad = next(info.key for info in rows if not _is_utf8(info.key))
        raise InvalidRequest(f"{url} has a name that is not UTF-8: {os.fsencode(bad)!r}") from err


def _is_utf8(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def default_name(url: str) -> str:
    """The last part of the URL: what a user would call it."""
    return os.path.basename(url.rstrip("/")) or url
