"""The last warnings and errors of this process's log, for faces to show."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import MutableMapping
from typing import Any

from forebay.core.protocol import Problem

_KEPT = 100
_KEYS_OF_THE_LOG = ("event", "level", "timestamp", "daemon", "exc_info")
_recent: deque[Problem] = deque(maxlen=_KEPT)


def keep(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor."""
    if event.get("level") in ("warning", "error", "critical"):
        details = [f"{key}: {value}" for key, value in event.items() if key not in _KEYS_OF_THE_LOG]
        _recent.append(Problem(time.time(), event["level"], str(event["event"]), ", ".join(details)))
    return event


def newest() -> list[Problem]:
    return list(reversed(_recent))
