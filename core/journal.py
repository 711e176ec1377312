"""A small SQLite database in WAL mode: the memory of a daemon.

A journal that cannot be read (a bad disk, a foreign file) is put aside, never deleted, and a new
one begins: what it said can be learnt again from the disk, so losing it is a miss, not a failure.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

log = structlog.get_logger()


class Journal:
    """One database file. `migrations[i]` takes the schema from version i to i + 1.

    `durable=True` fsyncs each transaction (SQLite synchronous=FULL); otherwise a power cut may
    lose the last transactions, but never corrupts the file.
    """

    def __init__(self, path: Path, migrations: Sequence[str], *, durable: bool) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = self._open(migrations, durable)
        except sqlite3.DatabaseError as err:
            aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
            log.warning("journal put aside", path=str(path), aside=str(aside), error=str(err))
            path.rename(aside)
            for leftover in (f"{path.name}-wal", f"{path.name}-shm"):
                path.with_name(leftover).unlink(missing_ok=True)
            self._db = self._open(migrations, durable)

    def _open(self, migrations: Sequence[str], durable: bool) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            for number, script in enumerate(migrations[version:], start=version + 1):
                db.executescript(f"BEGIN; {script}; PRAGMA user_version={number}; COMMIT;")
        except BaseException:
            db.close()
            raise
        return db

    @contextmanager
    def transact(self) -> Iterator[sqlite3.Connection]:
        """All statements of the block, or none. A block inside another one is part of it."""
        if self._db.in_transaction:
            yield self._db
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            # A full disk may have rolled it back already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def rows(self, sql: str, *args: object) -> list[sqlite3.Row]:
        return self._db.execute(sql, args).fetchall()

    def row(self, sql: str, *args: object) -> sqlite3.Row | None:
        found: sqlite3.Row | None = self._db.execute(sql, args).fetchone()
        return found

    def run(self, sql: str, *args: object) -> int:
        """One statement; the number of rows it changed."""
        return self._db.execute(sql, args).rowcount

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """No fsync in this block: for what a power cut would take anyway. A crash loses nothing."""
        self._db.execute("PRAGMA synchronous=NORMAL")
        try:
            yield
        finally:
            self._db.execute("PRAGMA synchronous=FULL")

    def close(self) -> None:
        self._db.close()
