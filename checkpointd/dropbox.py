"""Watched folders: what other tools write there becomes a checkpoint, with no change to the script.

Events (inotify, through watchdog) only say that it is worth looking; what there is, is found by looking.
So an overflowing queue, a restart, or a file system without events costs a little time and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import anyio
import structlog
from anyio import from_thread, to_thread
from anyio.lowlevel import EventLoopToken, current_token
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from forebay.checkpointd.attempts import Attempt, Attempts
from forebay.checkpointd.pipeline import Pipeline
from forebay.checkpointd.recipes import RECIPES, Candidate
from forebay.core import metrics
from forebay.core.config import DropboxSettings
from forebay.core.errors import NotFound
from forebay.core.protocol import Absorb

log = structlog.get_logger()

_LOOK_AGAIN_S = 30.0
_TRY_AGAIN_S = 60.0


class Dropbox:
    """One folder. Whatever lies still for `settle_s` and is complete by its recipe is taken, once."""

    def __init__(self, settings: DropboxSettings, attempts: Attempts, pipeline: Pipeline) -> None:
        self._settings = settings
        self._attempts = attempts
        self._pipeline = pipeline
        self._recipe = RECIPES[settings.recipe]
        self._tried_at: dict[str, float] = {}

    async def run(self) -> None:
        """Until cancelled."""
        log.info("watching", folder=str(self._settings.path), recipe=self._settings.recipe)
        with _Watch(self._settings.path, current_token()) as watch:
            while True:
                changed = watch.changed
                try:
                    wait_s = await self._look()
                except OSError as err:
                    log.warning(
                        "watched folder cannot be read", folder=str(self._settings.path), error=str(err)
                    )
                    metrics.checkpoint_errors.labels("dropbox").inc()
                    wait_s = _LOOK_AGAIN_S
                watch.begin()
                with anyio.move_on_after(wait_s):
                    await changed.wait()
                    # Writers come in bursts.
                    await anyio.sleep(self._settings.settle_s)

    async def _look(self) -> float:
        """Take what is ready; seconds until something may be."""
        candidates = await to_thread.run_sync(lambda: list(self._recipe.find(self._settings.path)))
        wait_s = _LOOK_AGAIN_S
        for candidate in sorted(candidates, key=lambda found: found.step):
            if self._known(candidate):
                continue
            still_s = time.time() - candidate.changed_at
            if still_s < self._settings.settle_s:
                # A time in the future (a clock that was set back) is not waited for.
                wait_s = min(wait_s, self._settings.settle_s - max(still_s, 0.0) + 0.01)
            elif await to_thread.run_sync(self._recipe.complete, candidate):
                self._take(candidate)
        return wait_s

    def _known(self, candidate: Candidate) -> bool:
        """These very files were taken before, here or in an earlier life, and not in vain."""
        attempt_id = _attempt_id(candidate)
        try:
            known = self._attempts.get(self._run(candidate), attempt_id, 0)
        except NotFound:
            return False
        return known.error is None or time.monotonic() - self._tried_at.get(attempt_id, 0.0) < _TRY_AGAIN_S

    def _take(self, candidate: Candidate) -> None:
        attempt_id = _attempt_id(candidate)
        self._tried_at[attempt_id] = time.monotonic()
        run = self._run(candidate)
        log.info("taking", run=run, step=candidate.step, root=str(candidate.root), files=len(candidate.names))
        request = Absorb(run, candidate.step, attempt_id, 0, 1, 0, self._settings.upstream)
        size_bytes = sum((candidate.root / name).lstat().st_size for name in candidate.names)
        attempt: Attempt = self._attempts.add(request, size_bytes)
        self._pipeline.take(attempt, candidate)

    def _run(self, candidate: Candidate) -> str:
        return f"{self._settings.run}.{candidate.series}" if candidate.series else self._settings.run


def _attempt_id(candidate: Candidate) -> str:
    return f"watched-{candidate.signature}"


class _Watch(FileSystemEventHandler):
    """`changed` fires when something below the folder did; watching begins when the folder is there."""

    def __init__(self, folder: Path, token: EventLoopToken) -> None:
        self._folder = folder
        self._token = token
        self._observer = Observer()
        self._watching = False
        self.changed = anyio.Event()

    def begin(self) -> None:
        if not self._watching and self._folder.is_dir():
            try:
                self._observer.schedule(self, str(self._folder), recursive=True)
            except OSError as err:
                # Too many watches: it is looked at now and then all the same.
                log.warning("no events from the folder", folder=str(self._folder), error=str(err))
            self._watching = True

    def on_any_event(self, event: FileSystemEvent) -> None:
        if event.event_type in ("opened", "closed_no_write"):
            return
        self._in_loop(self._fire)

    def _in_loop(self, call: Callable[[], None]) -> None:
        try:
            from_thread.run_sync(call, token=self._token)
        except RuntimeError as err:
            # The loop is ending; so is the watch.
            log.debug("nobody listens any more", error=str(err))

    def _fire(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    def __enter__(self) -> _Watch:
        self._observer.start()
        self.begin()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._observer.stop()
