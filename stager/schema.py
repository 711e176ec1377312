"""The tables of stagerd's journal: one step per version, never changed once released."""

from __future__ import annotations

MIGRATIONS = (
    """
    CREATE TABLE datasets (
        id TEXT PRIMARY KEY, name TEXT NOT NULL, url TEXT NOT NULL, format TEXT NOT NULL,
        tenant TEXT NOT NULL, fingerprint TEXT NOT NULL, manifest TEXT NOT NULL, shards INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL, largest_bytes INTEGER NOT NULL, registered_at REAL NOT NULL);
    CREATE INDEX datasets_by_name ON datasets (name, registered_at);

    CREATE TABLE objects (
        id TEXT PRIMARY KEY, disk TEXT NOT NULL, tenant TEXT NOT NULL, size_bytes INTEGER NOT NULL,
        blocks_bytes INTEGER NOT NULL, digest TEXT NOT NULL, boot_id TEXT NOT NULL,
        used_at REAL NOT NULL, verified_at REAL NOT NULL) WITHOUT ROWID;
    CREATE INDEX objects_by_use ON objects (disk, used_at);
    CREATE INDEX objects_by_check ON objects (disk, verified_at);

    -- Counted as they come and go, so that a start reads one row and not all of them.
    CREATE TABLE totals (
        disk TEXT NOT NULL, tenant TEXT NOT NULL, objects INTEGER NOT NULL, blocks_bytes INTEGER NOT NULL,
        PRIMARY KEY (disk, tenant)) WITHOUT ROWID;
    CREATE TRIGGER object_came AFTER INSERT ON objects BEGIN
        INSERT INTO totals VALUES (NEW.disk, NEW.tenant, 1, NEW.blocks_bytes)
        ON CONFLICT DO UPDATE SET
            objects = objects + 1, blocks_bytes = blocks_bytes + NEW.blocks_bytes;
    END;
    CREATE TRIGGER object_went AFTER DELETE ON objects BEGIN
        UPDATE totals SET objects = objects - 1, blocks_bytes = blocks_bytes - OLD.blocks_bytes
        WHERE disk = OLD.disk AND tenant = OLD.tenant;
    END;

    CREATE TABLE indices (object_id TEXT PRIMARY KEY, samples INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE jobs (id TEXT PRIMARY KEY, started_at REAL NOT NULL, job BLOB NOT NULL);
    CREATE TABLE pins (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, dataset_id TEXT NOT NULL, selection BLOB,
        made_at REAL NOT NULL, expires_at REAL);
    """,
    # Indices are made again at need: one shard may be cut into samples in several ways.
    """
    DROP TABLE indices;
    CREATE TABLE sample_counts (
        object_id TEXT NOT NULL, cut TEXT NOT NULL, samples INTEGER NOT NULL,
        PRIMARY KEY (object_id, cut)) WITHOUT ROWID;
    """,
    """
    CREATE INDEX jobs_by_start ON jobs (started_at, id);
    CREATE TABLE once (key TEXT PRIMARY KEY, digest BLOB NOT NULL, reply BLOB NOT NULL, at REAL NOT NULL);
    """,
)
