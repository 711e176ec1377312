"""Snapshots larger than an arena: it comes several times, and each time its part goes to the disk (F12)."""

from __future__ import annotations

from anyio import to_thread

from forebay.checkpointd.attempts import Attempt
from forebay.checkpointd.spool import SnapshotFile, Spool, Written
from forebay.core.errors import ForebayError, ProtocolError
from forebay.core.protocol import Absorb, Wave
from forebay.tiers.filesystem import os_error


class Waves:
    """Files that are not whole yet, by connection and rank; they go with the connection."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._begun: dict[tuple[int, str, int], SnapshotFile] = {}

    async def add(
        self, session: int, request: Absorb, wave: Wave, arena_fd: int, size_bytes: int
    ) -> Written | None:
        """Write a part: what the file then is when it was the last one, else None.

        Raises ProtocolError for a part out of turn; DiskFull, CheckpointCorrupt: the file is then given up.
        """
        key = (session, request.run, request.rank)
        if wave.offset == 0:
            self._drop(key)
        else:
            self._check(key, request, wave)
        if not 0 < size_bytes <= wave.total_bytes - wave.offset:
            raise ProtocolError(
                f"{size_bytes} bytes at {wave.offset} do not belong into {wave.total_bytes} bytes"
            )
        attempt = Attempt.of(request, wave.total_bytes)
        try:
            if wave.offset == 0:
                self._begun[key] = await to_thread.run_sync(self._spool.begin, attempt)
            file = self._begun[key]
            await to_thread.run_sync(file.append, arena_fd, request.generation, size_bytes)
            if file.written_bytes < wave.total_bytes:
                return None
            written = await to_thread.run_sync(self._spool.publish, file, request.about)
        except OSError as err:
            self._drop(key)
            raise os_error(err, self._spool.folder(attempt)) from err
        except ForebayError:
            self._drop(key)
            raise
        self._drop(key)
        return written

    def left(self, session: int) -> None:
        """A connection has ended."""
        for key in [key for key in self._begun if key[0] == session]:
            self._drop(key)

    def _check(self, key: tuple[int, str, int], request: Absorb, wave: Wave) -> None:
        file = self._begun.get(key)
        if file is None:
            raise ProtocolError(f"wave at {wave.offset} of attempt {request.attempt}, which was not begun")
        expected = (file.attempt.attempt, file.written_bytes, file.attempt.size_bytes)
        if (request.attempt, wave.offset, wave.total_bytes) != expected:
            raise ProtocolError(f"wave at {wave.offset} of {request.attempt} is out of turn after {expected}")

    def _drop(self, key: tuple[int, str, int]) -> None:
        """What was published keeps its name."""
        file = self._begun.pop(key, None)
        if file:
            file.close()
