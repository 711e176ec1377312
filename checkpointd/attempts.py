"""The journal of attempts: how far each rank's part of each save came, through any crash."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import msgspec

from forebay.core import metrics
from forebay.core.errors import NotFound
from forebay.core.journal import Journal
from forebay.core.protocol import LEVELS, Absorb, AttemptStatus, Level

_MIGRATIONS = (
    """
    CREATE TABLE attempts (
        run TEXT NOT NULL, attempt TEXT NOT NULL, rank INTEGER NOT NULL, step INTEGER NOT NULL,
        world_size INTEGER NOT NULL, upstream TEXT, level TEXT NOT NULL, size_bytes INTEGER NOT NULL,
        digest TEXT, error TEXT, absorbed_at REAL NOT NULL, local_at REAL, durable_at REAL,
        committed_at REAL, PRIMARY KEY (run, attempt, rank));
    CREATE INDEX attempts_by_level ON attempts (level);
    """,
    "ALTER TABLE attempts ADD COLUMN replicated_at REAL;",
    "ALTER TABLE attempts ADD COLUMN sample TEXT; ALTER TABLE attempts ADD COLUMN same_as INTEGER;",
)


class Attempt(msgspec.Struct, frozen=True):
    """One rank's part of one save. `same_as`: the step saved before it, when its tensors seem to be those."""

    run: str
    attempt: str
    rank: int
    step: int
    world_size: int
    upstream: str | None
    level: Level
    size_bytes: int
    digest: str | None = None
    error: str | None = None
    absorbed_at: float = 0.0
    local_at: float | None = None
    durable_at: float | None = None
    committed_at: float | None = None
    replicated_at: float | None = None
    sample: str | None = None
    same_as: int | None = None

    @classmethod
    def of(cls, request: Absorb, size_bytes: int) -> Attempt:
        return cls(
            request.run, request.attempt, request.rank, request.step, request.world_size,
            request.upstream, "absorbed", size_bytes, absorbed_at=time.time(),
        )  # fmt: skip

    @property
    def open(self) -> bool:
        """Work is still to be done for it."""
        return self.error is None and self.level != "committed"

    def status(self) -> AttemptStatus:
        return AttemptStatus(
            self.run, self.step, self.attempt, self.rank, self.level, self.size_bytes, self.error,
            self.absorbed_at, self.local_at, self.durable_at, self.committed_at,
            self.replicated_at, self.same_as,
        )  # fmt: skip


class Attempts:
    """Levels only go up; an attempt that failed says why and stays where it was."""

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path, _MIGRATIONS, durable=True)
        self._changed = anyio.Event()
        # What was only in memory when the daemon died is gone with it, and must not look pending.
        self._journal.run(
            "UPDATE attempts SET error='checkpointd ended before the snapshot was on disk' "
            "WHERE level='absorbed' AND error IS NULL"
        )
        self._gauge()

    def close(self) -> None:
        self._journal.close()

    def add(self, request: Absorb, size_bytes: int) -> Attempt:
        attempt = Attempt.of(request, size_bytes)
        columns = msgspec.structs.astuple(attempt)
        # The snapshot itself is only in memory yet: the trainer must not wait for a disk here.
        with self._journal.relaxed():
            self._journal.run(
                f"INSERT OR REPLACE INTO attempts ({', '.join(Attempt.__struct_fields__)}) "
                f"VALUES ({', '.join('?' * len(columns))})",
                *columns,
            )
        self._gauge()
        return attempt

    def get(self, run: str, attempt: str, rank: int) -> Attempt:
        row = self._journal.row(
            "SELECT * FROM attempts WHERE run=? AND attempt=? AND rank=?", run, attempt, rank
        )
        if row is None:
            raise NotFound(f"checkpointd knows no attempt {attempt} of {run}, rank {rank}")
        return msgspec.convert(dict(row), Attempt)

    def open(self) -> list[Attempt]:
        return self._select("error IS NULL AND level != 'committed'")

    def recent(self, limit: int = 50) -> list[Attempt]:
        return self._select(f"1 ORDER BY absorbed_at DESC LIMIT {limit}")

    def of_run(self, run: str) -> list[Attempt]:
        return self._select("run=?", run)

    def reached(self, attempt: Attempt, level: Level, digest: str | None = None) -> Attempt:
        """The attempt at its new level; waiters wake."""
        now = time.time()
        self._journal.run(
            f"UPDATE attempts SET level=?, {level}_at=?, digest=COALESCE(?, digest), error=NULL "
            "WHERE run=? AND attempt=? AND rank=?",
            level, now, digest, attempt.run, attempt.attempt, attempt.rank,
        )  # fmt: skip
        metrics.checkpoint_seconds.labels(level).observe(now - attempt.absorbed_at)
        self._wake()
        return self.get(attempt.run, attempt.attempt, attempt.rank)

    def local(self, attempt: Attempt, digest: str, sample: str | None) -> Attempt:
        """On the disk. `sample` (sample.Sample) is compared with that of the save before it."""
        before = self._journal.row(
            "SELECT step, sample FROM attempts WHERE run=? AND rank=? AND absorbed_at<? "
            "AND sample IS NOT NULL ORDER BY absorbed_at DESC LIMIT 1",
            attempt.run, attempt.rank, attempt.absorbed_at,
        )  # fmt: skip
        same = before is not None and before["sample"] == sample and before["step"] != attempt.step
        self._journal.run(
            "UPDATE attempts SET sample=?, same_as=? WHERE run=? AND attempt=? AND rank=?",
            sample, before["step"] if before and same else None, attempt.run, attempt.attempt, attempt.rank,
        )  # fmt: skip
        return self.reached(attempt, "local", digest)

    def failed(self, attempt: Attempt, error: str) -> None:
        self._journal.run(
            "UPDATE attempts SET error=? WHERE run=? AND attempt=? AND rank=? AND level != 'committed'",
            error, attempt.run, attempt.attempt, attempt.rank,
        )  # fmt: skip
        self._wake()

    async def wait(self, run: str, attempt: str, rank: int, level: Level, timeout_s: float) -> Attempt | None:
        """The attempt once it has that level or an error; None after the time."""
        with anyio.move_on_after(timeout_s):
            while True:
                changed = self._changed
                now = self.get(run, attempt, rank)
                if now.error or LEVELS.index(now.level) >= LEVELS.index(level):
                    return now
                await changed.wait()
        return None

    async def changed(self, timeout_s: float) -> None:
        """Something moved, or the time is up."""
        with anyio.move_on_after(timeout_s):
            await self._changed.wait()

    def _select(self, where: str, *args: object) -> list[Attempt]:
        rows = self._journal.rows(f"SELECT * FROM attempts WHERE {where}", *args)
        return [msgspec.convert(dict(row), Attempt) for row in rows]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
        self._gauge()

    def _gauge(self) -> None:
        metrics.checkpoint_pending.set(len(self.open()))
