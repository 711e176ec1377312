"""What this node knows and holds: datasets, staged objects, sample indices, stage jobs (SQLite)."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import msgspec

from forebay.core.errors import DatasetNotFound, NotFound
from forebay.core.journal import Journal
from forebay.core.protocol import Dataset, StageJob
from forebay.stager.manifest import Frozen, Manifest, default_name

_MIGRATIONS = (
    """
    CREATE TABLE datasets (
        id TEXT PRIMARY KEY, name TEXT NOT NULL, url TEXT NOT NULL, format TEXT NOT NULL,
        fingerprint TEXT NOT NULL, manifest TEXT NOT NULL, shards INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL, largest_bytes INTEGER NOT NULL, registered_at REAL NOT NULL);
    CREATE INDEX datasets_by_name ON datasets (name, registered_at);
    CREATE TABLE objects (
        id TEXT PRIMARY KEY, size_bytes INTEGER NOT NULL, blocks_bytes INTEGER NOT NULL,
        digest TEXT NOT NULL, boot_id TEXT NOT NULL, used_at REAL NOT NULL);
    CREATE TABLE indices (object_id TEXT PRIMARY KEY, samples INTEGER NOT NULL);
    CREATE TABLE jobs (id TEXT PRIMARY KEY, started_at REAL NOT NULL, job BLOB NOT NULL);
    """,
)


class Held(msgspec.Struct):
    """A staged object. `boot_id` says under which boot of the machine its bytes were last verified."""

    id: str
    size_bytes: int
    blocks_bytes: int
    digest: str
    boot_id: str
    used_at: float


class Catalog:
    """A crash loses at most what the disk can tell again; `objects` without file are dropped on use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._journal = Journal(folder / "catalog.db", _MIGRATIONS, durable=False)
        self._manifests: dict[str, Manifest] = {}

    def close(self) -> None:
        self._journal.close()

    # datasets

    def add_dataset(self, name: str | None, url: str, format: str, frozen: Frozen) -> Dataset:
        """The same listing registered again is the same dataset, under its newest name."""
        name = name or default_name(url)
        dataset_id = f"{frozen.fingerprint[:12]}-{format}-{secrets.token_hex(2)}"
        known = self._journal.row(
            "SELECT id FROM datasets WHERE fingerprint=? AND url=? AND format=? AND name=?",
            frozen.fingerprint, url, format, name,
        )  # fmt: skip
        if known:
            self._journal.run("UPDATE datasets SET registered_at=? WHERE id=?", time.time(), known["id"])
            return self.dataset(known["id"])
        self._journal.run(
            "INSERT INTO datasets VALUES (?,?,?,?,?,?,?,?,?,?)",
            dataset_id, name, url, format, frozen.fingerprint, frozen.path.name,
            frozen.shards, frozen.size_bytes, frozen.largest_bytes, time.time(),
        )  # fmt: skip
        return self.dataset(dataset_id)

    def dataset(self, id_or_name: str) -> Dataset:
        """By id, or the newest listing under that name."""
        row = self._journal.row(
            "SELECT * FROM datasets WHERE id=? OR name=? ORDER BY registered_at DESC", id_or_name, id_or_name
        )
        if row is None:
            raise DatasetNotFound(f"no dataset {id_or_name!r} is registered on this node")
        return msgspec.convert(dict(row), Dataset)

    def datasets(self) -> list[Dataset]:
        rows = self._journal.rows("SELECT * FROM datasets ORDER BY name, registered_at DESC")
        return [msgspec.convert(dict(row), Dataset) for row in rows]

    def manifest(self, dataset_id: str) -> Manifest:
        if dataset_id not in self._manifests:
            row = self._journal.row("SELECT manifest, url FROM datasets WHERE id=?", dataset_id)
            if row is None:
                raise DatasetNotFound(f"no dataset {dataset_id!r} is registered on this node")
            path = self.manifests_folder / row["manifest"]
            if not path.is_file():
                raise DatasetNotFound(f"the manifest {path} is gone", hint="register the dataset again")
            self._manifests[dataset_id] = Manifest(path, row["url"])
        return self._manifests[dataset_id]

    @property
    def manifests_folder(self) -> Path:
        return self.folder / "manifests"

    # staged objects

    def held(self) -> dict[str, Held]:
        rows = self._journal.rows("SELECT * FROM objects")
        return {row["id"]: msgspec.convert(dict(row), Held) for row in rows}

    def put_object(self, held: Held) -> None:
        self._journal.run(
            "INSERT OR REPLACE INTO objects VALUES (?,?,?,?,?,?)", *msgspec.structs.astuple(held)
        )

    def drop_object(self, object_id: str) -> None:
        self._journal.run("DELETE FROM objects WHERE id=?", object_id)

    # sample indices

    def index_path(self, object_id: str) -> Path:
        return self.folder / "indices" / object_id[:2] / f"{object_id}.idx"

    def add_index(self, object_id: str, samples: int, payload: bytes) -> None:
        """The file appears by rename, then the row: a crash between them costs one index."""
        path = self.index_path(object_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")
        temporary.write_bytes(payload)
        temporary.rename(path)
        self._journal.run("INSERT OR REPLACE INTO indices VALUES (?,?)", object_id, samples)

    def samples(self, object_id: str) -> int:
        """Samples in that shard, -1 when nobody has counted them."""
        row = self._journal.row("SELECT samples FROM indices WHERE object_id=?", object_id)
        return row["samples"] if row and self.index_path(object_id).is_file() else -1

    # stage jobs

    def put_job(self, job: StageJob) -> None:
        self._journal.run(
            "INSERT INTO jobs VALUES (?,?,?) ON CONFLICT (id) DO UPDATE SET job=excluded.job",
            job.id, time.time(), msgspec.msgpack.encode(job),
        )  # fmt: skip

    def jobs(self) -> list[StageJob]:
        rows = self._journal.rows("SELECT job FROM jobs ORDER BY started_at DESC LIMIT 1000")
        return [msgspec.msgpack.decode(row["job"], type=StageJob) for row in rows]

    def job(self, job_id: str) -> StageJob:
        row = self._journal.row("SELECT job FROM jobs WHERE id=?", job_id)
        if row is None:
            raise NotFound(f"there is no stage job {job_id!r}")
        return msgspec.msgpack.decode(row["job"], type=StageJob)
