"""Named steps at which a test makes a process die, fail or stall; they cost one comparison when off.

`FOREBAY_FAILPOINTS` arms them: `NAME=ACTION`, several with commas. An action is `kill` (SIGKILL to
itself), `error:ENOSPC` (an OSError with that errno) or `delay:SECONDS`; `@N` behind it means at the
N-th time only. FreeBSD's fail(9) is the model.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.core.errors import ConfigError

VARIABLE = "FOREBAY_FAILPOINTS"

# In the order in which a shard passes them.
FETCH_POINTS = {
    "fetch.reserved": "room is reserved, nothing is on the disk",
    "landing.begun": "the temporary file has its space",
    "landing.written": "bytes are in the file, the record of ranges does not know it",
    "landing.recorded": "the record of ranges knows it",
    "landing.verified": "whole and verified, still under its temporary name",
    "landing.noted": "its extended attribute is set, not yet renamed",
    "landing.renamed": "it has its final name, the catalog does not know it",
    "fetch.kept": "the catalog knows it",
    "evict.chosen": "a victim is chosen, nothing is done to it",
    "evict.aside": "a victim has been renamed, the catalog still lists it",
    "evict.forgotten": "the catalog has dropped a victim, its bytes are still there",
}
# In the order in which a rank's part of a checkpoint passes them; its file lands like a shard.
CHECKPOINT_POINTS = {
    "absorb.noted": "the journal knows of a snapshot, nothing of it is on the disk",
    "spool.filed": "a rank's file is in the spool, its manifest is not",
    "spool.manifested": "its manifest is there, the journal does not know it",
    "multipart.sent": "a part of its file is upstream",
    "upload.put": "its file is upstream and verified, its manifest is not",
    "upload.manifested": "its manifest is upstream, the journal does not know it",
    "commit.put": "COMMIT.json is upstream, nobody here knows it",
    "commit.local": "COMMIT.json is in the spool, the journal does not know it",
    "retention.uncommitted": "COMMIT.json of an old checkpoint is gone, its files are there",
}
POINTS = FETCH_POINTS | CHECKPOINT_POINTS


@dataclass
class _Armed:
    action: Callable[[], None]
    only: int | None
    passes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def passed(self) -> None:
        with self.lock:
            self.passes += 1
            now = self.only in (None, self.passes)
        if now:
            self.action()


def failpoint(name: str) -> None:
    """Does what `name` is armed with. Raises OSError then, if it is told so."""
    if _armed and (found := _armed.get(name)):
        found.passed()


def parse(text: str) -> dict[str, _Armed]:
    """Raises ConfigError that names what is wrong."""
    armed: dict[str, _Armed] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, action = item.partition("=")
        action, _, only = action.partition("@")
        if name not in POINTS:
            raise ConfigError(f"{VARIABLE} names {name!r}", hint=f"one of {', '.join(POINTS)}")
        try:
            armed[name] = _Armed(_action(action), int(only) if only else None)
        except (ValueError, AttributeError) as err:
            raise ConfigError(
                f"{VARIABLE}: {item!r}", hint="kill, error:ENOSPC or delay:1.5, then @N"
            ) from err
    return armed


def _action(text: str) -> Callable[[], None]:
    kind, _, value = text.partition(":")
    match kind:
        case "kill":
            return lambda: os.kill(os.getpid(), signal.SIGKILL)
        case "delay":
            seconds = float(value)
            return lambda: time.sleep(seconds)
        case "error":
            number = int(getattr(errno, value))
            return lambda: _fail(number)
    raise ValueError(text)


def _fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


_armed = parse(os.environ.get(VARIABLE, ""))
