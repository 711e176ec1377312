"""checkpointd: wiring, nothing else."""

from __future__ import annotations

import anyio
import structlog
from anyio import to_thread

from forebay.checkpointd.attempts import Attempts
from forebay.checkpointd.dropbox import Dropbox
from forebay.checkpointd.memory import Memory
from forebay.checkpointd.pipeline import Pipeline
from forebay.checkpointd.sessions import CheckpointSessions
from forebay.checkpointd.spool import Spool
from forebay.core import channel
from forebay.core.config import Settings
from forebay.core.service import own_directory
from forebay.core.systemd import notify

log = structlog.get_logger()


class Checkpointd:
    """`main` serves, `drain` comes before its end (core.service)."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._pipeline: Pipeline | None = None

    async def main(self) -> None:
        """Serve until cancelled. Raises AlreadyRunning when another daemon owns the spool."""
        settings = self.settings
        with own_directory(settings.spool_dir), own_directory(settings.home / "checkpoint"):
            attempts = Attempts(settings.home / "checkpoint" / "journal.db")
            spool, memory = Spool(settings.spool_dir), Memory(settings.checkpoint.keep_memory_s)
            try:
                await to_thread.run_sync(spool.sweep)
                async with anyio.create_task_group() as tasks:
                    self._pipeline = Pipeline(settings, attempts, spool, tasks)
                    sessions = CheckpointSessions(attempts, spool, memory, self._pipeline)
                    tasks.start_soon(memory.run)
                    self._pipeline.resume()
                    for folder in settings.dropbox:
                        tasks.start_soon(Dropbox(folder, attempts, self._pipeline).run)
                    async with await channel.listen(settings.checkpoint_socket) as listener:
                        log.info("ready", socket=str(settings.checkpoint_socket), spool=str(spool.root))
                        notify("READY=1")
                        await channel.serve(listener, "checkpointd", sessions.open_session)
            finally:
                attempts.close()

    async def drain(self) -> None:
        """What is only in memory goes to the disk first."""
        if self._pipeline:
            await self._pipeline.drain()
