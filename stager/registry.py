"""The datasets that this node knows, and the sample indices of their shards."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from forebay.core.errors import DatasetNotFound
from forebay.core.journal import Journal
from forebay.core.protocol import Dataset
from forebay.stager.manifest import Frozen, Manifest, default_name

_COLUMNS = "id, name, url, format, tenant, fingerprint, shards, size_bytes, largest_bytes"


class Registry:
    def __init__(self, journal: Journal, folder: Path) -> None:
        self._journal = journal
        self._folder = folder
        self._manifests: dict[str, Manifest] = {}
        self._by_id: dict[str, tuple[Dataset, Manifest]] = {}

    @property
    def manifests_folder(self) -> Path:
        return self._folder / "manifests"

    # Datasets

    def add(self, name: str | None, url: str, format: str, tenant: str, frozen: Frozen) -> Dataset:
        """The same listing registered again is the same dataset, under its newest name."""
        name = name or default_name(url)
        known = self._journal.row(
            "SELECT id FROM datasets WHERE fingerprint=? AND url=? AND format=? AND name=? AND tenant=?",
            frozen.fingerprint, url, format, name, tenant,
        )  # fmt: skip
        dataset_id = known["id"] if known else f"{frozen.fingerprint[:12]}-{format}-{secrets.token_hex(2)}"
        if known:
            self._journal.run("UPDATE datasets SET registered_at=? WHERE id=?", time.time(), dataset_id)
        else:
            self._journal.run(
                "INSERT INTO datasets VALUES (?,?,?,?,?,?,?,?,?,?,?)",
                dataset_id, name, url, format, tenant, frozen.fingerprint, frozen.path.name,
                frozen.shards, frozen.size_bytes, frozen.largest_bytes, time.time(),
            )  # fmt: skip
        return self.find(dataset_id)

    def find(self, id_or_name: str, tenant: str | None = None) -> Dataset:
        """By id, or the newest listing under that name, of a tenant if one is given."""
        if tenant is None and (known := self._by_id.get(id_or_name)):
            return known[0]
        row = self._journal.row(
            f"SELECT {_COLUMNS} FROM datasets WHERE (id=? OR name=?) AND (? IS NULL OR tenant=?)"
            " ORDER BY registered_at DESC, rowid DESC",
            id_or_name, id_or_name, tenant, tenant,
        )  # fmt: skip
        if row is None:
            raise DatasetNotFound(f"no dataset {id_or_name!r} is registered on this node")
        return msgspec.convert(dict(row), Dataset)

    def all(self) -> list[Dataset]:
        rows = self._journal.rows(f"SELECT {_COLUMNS} FROM datasets ORDER BY name, registered_at DESC")
        return [msgspec.convert(dict(row), Dataset) for row in rows]

    def manifest(self, dataset_id: str) -> Manifest:
        """One object per file, so that what several datasets and plans share is opened once."""
        if known := self._by_id.get(dataset_id):
            return known[1]
        row = self._journal.row("SELECT manifest, url FROM datasets WHERE id=?", dataset_id)
        if row is None:
            raise DatasetNotFound(f"no dataset {dataset_id!r} is registered on this node")
        name = row["manifest"]
        if name not in self._manifests:
            self._manifests[name] = Manifest(self.manifests_folder / name, row["url"])
        self._by_id[dataset_id] = (self.find(dataset_id), self._manifests[name])
        return self._manifests[name]

    # Sample indices

    def _index_path(self, object_id: str, index: str) -> Path:
        """`index` is any text of a client's: only its digest becomes part of a name."""
        name = f"{object_id}-{xxhash.xxh3_64_hexdigest(index.encode())}.idx"
        return self._folder / "indices" / object_id[:2] / name

    def add_index(self, object_id: str, index: str, samples: int, payload: bytes) -> None:
        """The file appears by rename, then the row: a crash between them costs one index."""
        path = self._index_path(object_id, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")
        temporary.write_bytes(payload)
        temporary.rename(path)
        self._journal.run("INSERT OR REPLACE INTO sample_counts VALUES (?,?,?)", object_id, index, samples)

    def samples(self, object_id: str, index: str) -> int:
        """Samples in that shard, cut in that way; -1 when nobody has counted them."""
        counted = self._counted(object_id, index)
        return -1 if counted is None or not self._index_path(object_id, index).is_file() else counted

    def open_index(self, object_id: str, index: str) -> int | None:
        """A descriptor of the index, None when there is none."""
        if self._counted(object_id, index) is None:
            return None
        with suppress(FileNotFoundError):
            return os.open(self._index_path(object_id, index), os.O_RDONLY | os.O_CLOEXEC)
        return None

    def _counted(self, object_id: str, index: str) -> int | None:
        row = self._journal.row(
            "SELECT samples FROM sample_counts WHERE object_id=? AND cut=?", object_id, index
        )
        return row["samples"] if row else None
