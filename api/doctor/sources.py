"""Each source: its name, its latency, its clock, and whether our credentials are taken there."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import anyio

from forebay.api.doctor.finding import Finding, Node
from forebay.core.config import Settings
from forebay.core.errors import ForebayError
from forebay.core.redact import redacted
from forebay.tiers.store import normalize_url, open_store

_LIST_S = 15.0
_CONNECT_S = 5.0
_SLOW_DNS_S = 0.1
_SLOW_S = 0.05
_DEFAULT_PORTS = {"https": 443, "http": 80, "s3": 443}


def check_sources(node: Node) -> Iterator[Finding]:
    urls = dict.fromkeys(normalize_url(url) for url in wanted(node))
    if not urls:
        yield Finding(
            "source",
            "note",
            "no source is set or was given",
            "credentials and latency are not checked",
            "forebay doctor --source s3://bucket/train",
        )
    for url in urls:
        if place := endpoint(url, node.settings, node.env.get("AWS_ENDPOINT_URL")):
            yield from _reach(url, *place)
        yield _credentials(url, node.settings)


def wanted(node: Node) -> list[str]:
    """Those given, those set, and the warm tier."""
    warm = [node.settings.warm.url] if node.settings.warm.url else []
    return [*node.sources, *(source.url for source in node.settings.source), *warm]


def endpoint(url: str, settings: Settings, variable: str | None) -> tuple[str, int] | None:
    """Host and port that a URL leads to; None for a folder, and where a library knows it alone."""
    parts = urlsplit(url)
    if parts.scheme in ("s3", "http", "https"):
        found = settings.s3.endpoint or variable
        real = urlsplit(found) if parts.scheme == "s3" and found else parts
        if parts.scheme == "s3" and not found:
            return f"s3.{settings.s3.region or 'us-east-1'}.amazonaws.com", 443
        return (real.hostname or "", real.port or _DEFAULT_PORTS.get(real.scheme, 443))
    return None


def _reach(url: str, host: str, port: int) -> Iterator[Finding]:
    shown = redacted(url)
    began_at = time.monotonic()
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as err:
        yield Finding(
            "dns",
            "fail",
            f"{host} (for {shown}) has no address: {err}",
            "nothing can be fetched from there",
            "check /etc/resolv.conf, and the spelling of the endpoint",
        )
        return
    dns_s = time.monotonic() - began_at
    if dns_s > _SLOW_DNS_S:
        yield Finding(
            "dns",
            "warn",
            f"to look up {host} took {1000 * dns_s:.0f} ms",
            "each new connection may wait for it",
            "run a caching resolver on the node",
        )
    began_at = time.monotonic()
    try:
        with socket.create_connection((str(addresses[0][4][0]), port), _CONNECT_S):
            latency_s = time.monotonic() - began_at
    except OSError as err:
        yield Finding(
            "source",
            "fail",
            f"nobody answers at {host}:{port} (for {shown}): {err}",
            "nothing can be fetched from there",
            "check the endpoint, firewalls, and the route",
        )
        return
    told = f"{host}:{port} answers in {1000 * latency_s:.1f} ms"
    if latency_s > _SLOW_S:
        yield Finding(
            "source", "note", told, "small shards pay this for each one", "use shards of 100 MB and more"
        )
    else:
        yield Finding("source", "ok", told)


def _credentials(url: str, settings: Settings) -> Finding:
    shown = redacted(url)
    try:
        found = anyio.run(_first, url, settings)
    except TimeoutError:
        return Finding(
            "credentials",
            "fail",
            f"{shown} was not listed within {_LIST_S:g} s",
            "nothing can be registered there",
            "check the endpoint and the network",
        )
    except (ForebayError, OSError) as err:
        hint = err.hint if isinstance(err, ForebayError) else ""
        message = err.message if isinstance(err, ForebayError) else str(err)
        return Finding("credentials", "fail", redacted(f"{shown}: {message}"), "nothing can be fetched", hint)
    if found is None:
        return Finding("credentials", "warn", f"{shown} can be listed, and is empty", "", "check the prefix")
    return Finding("credentials", "ok", f"{shown} can be listed")


async def _first(url: str, settings: Settings) -> str | None:
    with anyio.fail_after(_LIST_S):
        async for info in open_store(url, settings).list():
            return info.key
    return None
