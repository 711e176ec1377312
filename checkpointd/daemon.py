"""checkpointd: wiring, nothing else."""

from __future__ import annotations

import anyio
import structlog
from anyio import to_thread

from forebay.checkpointd.attempts import Attempts
from forebay.checkpointd.pipeline import Pipeline
from forebay.checkpointd.sessions import CheckpointSessions
from forebay.checkpointd.spool import Spool
from forebay.core import channel
from forebay.core.config import Settings
from forebay.core.service import notify, own_directory

log = structlog.get_logger()


async def main(settings: Settings) -> None:
    """Serve until cancelled. Raises AlreadyRunning when another daemon owns the spool."""
    with own_directory(settings.spool_dir), own_directory(settings.home / "checkpoint"):
        attempts = Attempts(settings.home / "checkpoint" / "journal.db")
        spool = Spool(settings.spool_dir)
        try:
            await to_thread.run_sync(spool.sweep)
            async with anyio.create_task_group() as tasks:
                pipeline = Pipeline(settings, attempts, spool, tasks)
                sessions = CheckpointSessions(settings, attempts, spool, pipeline)
                pipeline.resume()
                async with await channel.listen(settings.checkpoint_socket) as listener:
                    log.info("ready", socket=str(settings.checkpoint_socket), spool=str(spool.root))
                    notify("READY=1")
                    await channel.serve(listener, "checkpointd", sessions.open_session)
        finally:
            attempts.close()
