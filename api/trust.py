"""TLS as a client: certificates to trust in place of the system's, and one to be known by."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from forebay.core.errors import ConfigError


def trust(ca_file: Path | None, cert_file: Path | None = None, *, of: str = "") -> ssl.SSLContext | bool:
    """For httpx's `verify`. `cert_file`: certificate and key in one (PEM); `of`: where both are set.

    Raises ConfigError, which names the setting.
    """
    if not (ca_file or cert_file):
        return True
    with _naming(f"{of}ca_file", ca_file):
        context = ssl.create_default_context(cafile=str(ca_file)) if ca_file else httpx.create_ssl_context()
    if cert_file:
        with _naming(f"{of}cert_file", cert_file):
            context.load_cert_chain(cert_file)
    return context


@contextmanager
def _naming(setting: str, file: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise ConfigError(f"{setting} {file}: {err}") from err
