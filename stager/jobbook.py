"""Stage jobs as the journal keeps them."""

from __future__ import annotations

import msgspec

from forebay.core.errors import NotFound
from forebay.core.journal import Journal
from forebay.core.protocol import StageJob

_LISTED = 1000


class JobBook:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def put(self, job: StageJob) -> None:
        self._journal.run(
            "INSERT INTO jobs VALUES (?,?,?) ON CONFLICT (id) DO UPDATE SET job=excluded.job",
            job.id, job.started_at, msgspec.msgpack.encode(job),
        )  # fmt: skip

    def get(self, job_id: str) -> StageJob:
        """Raises NotFound."""
        row = self._journal.row("SELECT job FROM jobs WHERE id=?", job_id)
        if row is None:
            raise NotFound(f"there is no stage job {job_id!r}")
        return msgspec.msgpack.decode(row["job"], type=StageJob)

    def all(self) -> list[StageJob]:
        """The newest, newest first."""
        rows = self._journal.rows(f"SELECT job FROM jobs ORDER BY started_at DESC LIMIT {_LISTED}")
        return [msgspec.msgpack.decode(row["job"], type=StageJob) for row in rows]
