"""Certificates to trust in place of the system's."""

from __future__ import annotations

import ssl
from pathlib import Path

from forebay.core.errors import ConfigError


def trust(ca_file: Path | None, setting: str) -> ssl.SSLContext | bool:
    """For httpx's `verify`. Raises ConfigError, which names the setting."""
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as err:
        raise ConfigError(f"{setting} {ca_file}: {err}") from err
