"""Stage jobs as the journal keeps them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from forebay.core.errors import NotFound
from forebay.core.journal import Journal
from forebay.core.protocol import StageJob

_PAGE = 256


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

    def newest(self, before: tuple[float, str] | None = None) -> Iterator[StageJob]:
        """Newest first, from after the one that began and is called so."""
        started_at, job_id = before or (math.inf, "")
        while rows := self._journal.rows(
            "SELECT job FROM jobs WHERE (started_at, id) < (?, ?) ORDER BY started_at DESC, id DESC LIMIT ?",
            started_at, job_id, _PAGE,
        ):  # fmt: skip
            for row in rows:
                job = msgspec.msgpack.decode(row["job"], type=StageJob)
                started_at, job_id = job.started_at, job.id
                yield job
