"""The nodes of a cluster, as a gateway knows them, and one question asked of them all.

Which nodes there are is looked up each time: they come and go. No node waits for another.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar
from urllib.parse import urlsplit, urlunsplit

import anyio
import msgspec
import structlog
from anyio import to_thread

from forebay.api.client.client import AsyncClient
from forebay.core import redis
from forebay.core.config import ClusterSettings, Settings
from forebay.core.errors import ConfigError, DaemonUnavailable, ForebayError, WaitTimeout
from forebay.core.redact import redacted

log = structlog.get_logger()
T = TypeVar("T")

_AT_ONCE = 64
_KEYS = "forebay/nodes/"
_ANNOUNCED_MS = 15_000
_AGAIN_S = 5.0


class Answer(msgspec.Struct, Generic[T], frozen=True):
    """Of one node: what it said, or why it did not."""

    url: str
    value: T | None
    error: ForebayError | None


class Cluster:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings.cluster
        self._clients: dict[str, AsyncClient] = {}

    @property
    def configured(self) -> bool:
        return bool(self._settings.nodes or self._settings.dns or self._settings.redis)

    async def urls(self) -> list[str]:
        """In order, each once. Raises DaemonUnavailable when the directory does not answer."""
        found = [url.rstrip("/") for url in self._settings.nodes]
        if self._settings.dns:
            found += await to_thread.run_sync(_by_dns, self._settings.dns)
        if self._settings.redis:
            found += await _by_redis(self._settings.redis)
        return sorted(set(found))

    async def each(
        self,
        ask: Callable[[AsyncClient], Awaitable[T]],
        urls: list[str],
        *,
        within_s: float | None = None,
    ) -> list[Answer[T]]:
        """All of them at once, each within cluster.timeout_s or sooner; in the order of `urls`."""
        timeout_s = min(self._settings.timeout_s, within_s or self._settings.timeout_s)
        limit = anyio.CapacityLimiter(_AT_ONCE)
        found: dict[str, Answer[T]] = {}

        async def one(url: str) -> None:
            async with limit:
                found[url] = await self._one(ask, url, timeout_s)

        async with anyio.create_task_group() as tasks:
            for url in urls:
                tasks.start_soon(one, url)
        return [found[url] for url in urls]

    async def _one(self, ask: Callable[[AsyncClient], Awaitable[T]], url: str, timeout_s: float) -> Answer[T]:
        try:
            with anyio.fail_after(timeout_s):
                return Answer(url, await ask(self._client(url)), None)
        except TimeoutError:
            return Answer(url, None, WaitTimeout(f"{url} did not answer within {timeout_s:g} s"))
        except ForebayError as err:
            return Answer(url, None, err)

    def _client(self, url: str) -> AsyncClient:
        if url not in self._clients:
            self._clients[url] = AsyncClient(
                url,
                token=_token(self._settings),
                ca_file=self._settings.ca_file,
                cert_file=self._settings.cert_file,
            )
        return self._clients[url]

    async def announce(self, node: str) -> None:
        """In Redis, until cancelled; a node that falls silent is gone from there within seconds."""
        if not (self._settings.redis and self._settings.url):
            return
        server = redis.connect(self._settings.redis, "cluster.redis")
        told = True
        while True:
            try:
                with redis.as_os_errors():
                    await server.set(f"{_KEYS}{node}", self._settings.url, px=_ANNOUNCED_MS)
                told = True
            except OSError as err:
                if told:
                    log.warning("this node is not announced", error=str(err))
                told = False
            await anyio.sleep(_AGAIN_S)

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()


def _token(settings: ClusterSettings) -> str | None:
    if settings.token_file is None:
        return None
    try:
        return settings.token_file.read_text().strip()
    except OSError as err:
        raise ConfigError(f"cluster.token_file {settings.token_file}: {err.strerror}") from err


def _by_dns(url: str) -> list[str]:
    """`http://forebay.svc:8370`: one URL for each address of the name (a headless service)."""
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 8370, type=socket.SOCK_STREAM)
    except OSError as err:
        raise DaemonUnavailable(
            f"cluster.dns {url}: {err}", hint="does the name resolve on this node?"
        ) from err
    hosts = [str(entry[4][0]) for entry in found]
    port = parts.port or 8370
    return [
        urlunsplit((parts.scheme, f"[{h}]:{port}" if ":" in h else f"{h}:{port}", "", "", "")) for h in hosts
    ]


async def _by_redis(url: str) -> list[str]:
    try:
        with redis.as_os_errors():
            async with redis.connect(url, "cluster.redis") as server:
                keys = [key async for key in server.scan_iter(match=f"{_KEYS}*")]
                values = await server.mget(keys) if keys else []
    except OSError as err:
        raise DaemonUnavailable(f"cluster.redis does not answer: {redacted(str(err))}", hint="") from err
    return [value.decode().rstrip("/") for value in values if value]
