"""Which sources a request may name: what the API reads, it reads with this node's rights, not the caller's.

Everything is refused but what is listed: `api.sources`, or the sources of the caller's tenant. Files and
plain HTTP hosts only where an administrator has listed them, a metadata service never.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote, urlsplit

from forebay.api.auth.principal import Principal
from forebay.core.config import Settings, TenantSettings
from forebay.core.errors import Forbidden, InvalidRequest
from forebay.core.redact import redacted

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^\x00-\x20\x7f\\]*")
# Link-local, where clouds keep the credentials of a machine; and AWS's over IPv6.
_NEVER = [ipaddress.ip_network(n) for n in ("169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128")]


def check_source(url: str, who: Principal, settings: Settings) -> None:
    """Raises InvalidRequest for what is no plain URL, Forbidden for what is not listed."""
    if "://" in url and "@" in urlsplit(url).netloc:
        raise InvalidRequest(
            f"{redacted(url)} holds credentials", hint="they belong in this node's environment"
        )
    if who.local:
        return
    if not _URL.fullmatch(url) or "::" in url.split("://", 1)[0]:
        raise InvalidRequest(f"{url!r} is not a URL of the kind s3://bucket/prefix")
    if any(part in (".", "..") for part in _parts(url)) or any(
        p in (".", "..") for p in _parts(_decoded(url))
    ):
        raise InvalidRequest(f"{url!r} has . or .. in its path")
    allowed = _tenant(who, settings).sources if who.tenant is not None else settings.api.sources
    if not any(_below(url, prefix) for prefix in allowed):
        raise Forbidden(
            f"{who.name} may not read {url}",
            hint="an administrator lists what may be read: api.sources, or the sources of the tenant",
        )
    _check_place(url, allowed)


def may_see_run(run: str, who: Principal, settings: Settings) -> bool:
    return who.tenant is None or any(fnmatchcase(run, form) for form in _tenant(who, settings).runs)


def _tenant(who: Principal, settings: Settings) -> TenantSettings:
    return next(
        (t for t in settings.tenant if t.name == who.tenant),
        TenantSettings(name=who.tenant or "", sources=(), runs=()),
    )


def _decoded(url: str) -> str:
    """Until nothing is left to decode: what is encoded twice is meant to pass unseen."""
    while (plain := unquote(url)) != url:
        url = plain
    return url.replace("\\", "/")


def _parts(url: str) -> list[str]:
    return urlsplit(url).path.split("/")


def _below(url: str, prefix: str) -> bool:
    """`s3://` allows the scheme; `s3://b/a` allows itself and `s3://b/a/...`, not `s3://b/ab`."""
    scheme, _, rest = url.partition("://")
    allowed, _, place = prefix.partition("://")
    host, slash, path = rest.partition("/")
    if scheme.lower() != allowed.lower():
        return False
    wanted = place.rstrip("/")
    return not wanted or f"{host.lower()}{slash}{path}/".startswith(f"{_lower_host(wanted)}/")


def _lower_host(place: str) -> str:
    host, slash, path = place.partition("/")
    return f"{host.lower()}{slash}{path}"


def _check_place(url: str, allowed: tuple[str, ...]) -> None:
    """Where the listed name really leads."""
    parts = urlsplit(url)
    if parts.scheme.lower() == "file":
        roots = [Path(urlsplit(prefix).path).resolve() for prefix in allowed if prefix.startswith("file://")]
        if parts.netloc or not any(Path(parts.path).resolve().is_relative_to(root) for root in roots):
            raise Forbidden(f"{url} leads out of what may be read")
    elif parts.scheme.lower() in ("http", "https"):
        for address in _addresses(parts.hostname or "", parts.port or 443):
            if any(address in network for network in _NEVER):
                raise Forbidden(f"{url} is an address of this machine's own network")


def _addresses(host: str, port: int) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as err:
        raise InvalidRequest(f"the host {host!r} has no address: {err}") from err
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    return [getattr(address, "ipv4_mapped", None) or address for address in addresses]
