"""What leaves the spool, after a commit and never before (C5)."""

from __future__ import annotations

import structlog

from forebay.checkpointd.attempts import Attempts
from forebay.checkpointd.commit import find_commits
from forebay.checkpointd.spool import Spool

log = structlog.get_logger()


async def trim(spool: Spool, attempts: Attempts, run: str, keep: int) -> None:
    """Keep the newest `keep` good committed checkpoints of a run in the spool, and all open attempts.

    What is older goes: further commits, and attempts that never completed. Upstream is not touched.
    """
    commits = await find_commits(spool.store, run)
    good = [(step, attempt) for commit, problem, step, attempt in commits if commit and not problem]
    kept = set(good[:keep])
    if not kept:
        return
    oldest_kept = min(step for step, _ in kept)
    busy = {(a.step, a.attempt) for a in attempts.of_run(run) if a.open}
    known = {(step, attempt) for _, _, step, attempt in commits}
    known |= {(a.step, a.attempt) for a in attempts.of_run(run)}
    for step, attempt in known - kept - busy:
        if step <= oldest_kept and spool.remove(run, step, attempt):
            log.info("left the spool", run=run, step=step, attempt=attempt)
