"""A Redis server, for whoever is set to use one: an extra that need not be installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forebay.core.errors import ConfigError
from forebay.core.redact import redacted

_TIMEOUT_S = 5


def connect(url: str, setting: str) -> Any:
    """Nothing is contacted yet. Raises ConfigError, which names the setting, where the library is missing."""
    try:
        from redis.asyncio import Redis
    except ImportError as err:
        raise ConfigError(
            f"{setting} {redacted(url)} needs redis", hint="pip install 'forebay[redis]'"
        ) from err
    return Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Its errors become OSError, the kind that everything else over a network has."""
    from redis.exceptions import RedisError

    try:
        yield
    except RedisError as err:
        raise OSError(str(err)) from err
