"""What this node holds and in which state (SQLite): looked up by id, never loaded as a whole.

A crash loses at most what the disk can tell again: an entry without its file is dropped on use, a
file without its entry carries its own record (stager.disk).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import msgspec

from forebay.core.journal import Journal

_PAGE = 1000


class Held(msgspec.Struct):
    """A staged object. `boot_id` says under which boot of the machine its bytes were last verified."""

    id: str
    disk: str
    tenant: str
    size_bytes: int
    blocks_bytes: int
    digest: str
    boot_id: str
    used_at: float
    verified_at: float


class Totals(msgspec.Struct, frozen=True):
    objects: int
    blocks_bytes: int


class Catalog:
    """`touch` is kept in memory until `flush`: a crash costs recency, nothing else."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._touched: dict[str, float] = {}

    def get(self, object_id: str) -> Held | None:
        row = self._journal.row("SELECT * FROM objects WHERE id=?", object_id)
        return Held(*row) if row else None

    def __contains__(self, object_id: str) -> bool:
        return self._journal.row("SELECT 1 FROM objects WHERE id=?", object_id) is not None

    def together(self) -> AbstractContextManager[object]:
        """One transaction for all that is put or dropped in this block; no waiting in it."""
        return self._journal.transact()

    def put(self, held: Held) -> None:
        """Replaces an entry as delete and insert, so that the totals follow."""
        with self._journal.transact() as db:
            db.execute("DELETE FROM objects WHERE id=?", (held.id,))
            db.execute("INSERT INTO objects VALUES (?,?,?,?,?,?,?,?,?)", msgspec.structs.astuple(held))

    def drop(self, object_id: str) -> None:
        self._touched.pop(object_id, None)
        self._journal.run("DELETE FROM objects WHERE id=?", object_id)

    def touch(self, object_id: str) -> None:
        self._touched[object_id] = time.time()

    def verified(self, held: Held, boot_id: str) -> None:
        self._journal.run(
            "UPDATE objects SET boot_id=?, verified_at=? WHERE id=?", boot_id, time.time(), held.id
        )

    def flush(self) -> None:
        """Write down what was used since the last time."""
        if self._touched:
            with self._journal.transact() as db:
                db.executemany(
                    "UPDATE objects SET used_at=? WHERE id=?",
                    [(used_at, object_id) for object_id, used_at in self._touched.items()],
                )
            self._touched.clear()

    def totals(self, disk: str | None = None, tenant: str | None = None) -> Totals:
        row = self._journal.row(
            "SELECT coalesce(sum(objects), 0), coalesce(sum(blocks_bytes), 0) FROM totals "
            "WHERE disk=coalesce(?, disk) AND tenant=coalesce(?, tenant)",
            disk, tenant,
        )  # fmt: skip
        assert row is not None
        return Totals(*row)

    def ids(self, disk: str) -> list[str]:
        """Every id on that disk; of a large tier in some tenths of a second, so not for each request."""
        return [row[0] for row in self._journal.rows("SELECT id FROM objects WHERE disk=?", disk)]

    def least_recent(self, disk: str) -> Iterator[Held]:
        """From the longest unused on, in pages: what is dropped or used meanwhile is no trouble."""
        return self._paged(disk, "used_at")

    def least_verified(self, disk: str) -> Iterator[Held]:
        return self._paged(disk, "verified_at")

    def _paged(self, disk: str, column: str) -> Iterator[Held]:
        self.flush()
        after, after_id = -1.0, ""
        while True:
            rows = self._journal.rows(
                f"SELECT * FROM objects WHERE disk=? AND ({column}, id) > (?, ?) "
                f"ORDER BY {column}, id LIMIT {_PAGE}",
                disk, after, after_id,
            )  # fmt: skip
            for row in rows:
                held = Held(*row)
                after, after_id = getattr(held, column), held.id
                yield held
            if len(rows) < _PAGE:
                return
