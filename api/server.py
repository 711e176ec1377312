"""forebay-api: where it listens, whom it lets in there, how it ends."""

from __future__ import annotations

import contextlib
import grp
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import structlog
import uvicorn
from starlette.types import ASGIApp

from forebay.api.auth.tokens import TokenBook
from forebay.api.rest.app import Api
from forebay.api.rest.http import protocol
from forebay.core import systemd
from forebay.core.channel import make_room_for
from forebay.core.config import Settings
from forebay.core.errors import ConfigError

log = structlog.get_logger()
_BACKLOG = 1024


class ApiServer:
    """`main` serves, `drain` comes before its end (core.service)."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._servers: list[_Server] = []
        self._api: Api | None = None
        self._ended = anyio.Event()

    async def main(self) -> None:
        """Serve until drained. Raises ConfigError for an address that cannot be served, or not so."""
        settings = self.settings
        tokens = TokenBook(settings.home)
        try:
            alone = is_loopback(settings.api.host)
            if not alone:
                _check_callers_known(settings, tokens)
            with _tcp(settings) as tcp, _unix(settings.api_socket, settings.api.group) as unix:
                self._api = Api(settings, tokens, alone=alone)
                tls = _tls(settings)
                await self._serve([(tcp, tls), (unix, None)])
        finally:
            tokens.close()
            self._ended.set()

    async def _serve(self, places: list[tuple[socket.socket, ssl.SSLContext | None]]) -> None:
        assert self._api
        ready = _Ready(len(places), self._announce)
        try:
            async with anyio.create_task_group() as background:
                background.start_soon(self._api.cluster.announce, self.settings.node)
                async with anyio.create_task_group() as tasks:
                    for sock, tls in places:
                        server = _Server(self._config(self._api.asgi, tls), ready)
                        self._servers.append(server)
                        tasks.start_soon(server.serve, [sock])
                background.cancel_scope.cancel()
        finally:
            await self._api.aclose()

    def _announce(self) -> None:
        log.info("ready", host=self.settings.api.host, port=self.settings.api.port)
        systemd.notify("READY=1")

    def _config(self, app: ASGIApp, tls: ssl.SSLContext | None) -> uvicorn.Config:
        api = self.settings.api
        config = uvicorn.Config(
            app,
            http=protocol(api.receive_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            # Whoever sits in front may not say who the caller is.
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(api.drain_s)),
            backlog=_BACKLOG,
        )
        config.load()
        config.ssl = tls
        return config

    async def drain(self) -> None:
        """Open requests come to their end, followers of jobs are sent home."""
        if self._api:
            self._api.streams.close()
        for server in self._servers:
            server.should_exit = True
        with anyio.move_on_after(self.settings.api.drain_s + 1):
            await self._ended.wait()


class _Ready:
    """Says so when all have begun."""

    def __init__(self, count: int, announce: Callable[[], None]) -> None:
        self._left = count
        self._announce = announce

    def one(self) -> None:
        self._left -= 1
        if not self._left:
            self._announce()


class _Server(uvicorn.Server):
    """uvicorn under our own life cycle: signals are core.service's, readiness is told."""

    def __init__(self, config: uvicorn.Config, ready: _Ready) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready.one()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host).is_loopback
    except ValueError as err:
        raise ConfigError(
            f"api.host is {host!r}", hint="an address, for example 127.0.0.1 or 0.0.0.0"
        ) from err


def _check_callers_known(settings: Settings, tokens: TokenBook) -> None:
    """Raises ConfigError: nobody listens to strangers."""
    api = settings.api
    if not (tokens.all() or api.oidc or (api.tls_client_ca and api.client)):
        raise ConfigError(
            f"api.host is {api.host}: without tokens, OIDC or client certificates that is loopback only",
            hint="`forebay token create`, or set [api.oidc], or api.tls_client_ca with [[api.client]]",
        )
    if not api.tls_cert:
        log.warning("tokens travel in clear", host=api.host, hint="set api.tls_cert and api.tls_key")


@contextlib.contextmanager
def _tcp(settings: Settings) -> Iterator[socket.socket]:
    host, port = settings.api.host, settings.api.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as err:
        raise ConfigError(
            f"the API cannot listen on {host}:{port}: {err.strerror}", hint="set api.port"
        ) from err
    with sock:
        yield sock


@contextlib.contextmanager
def _unix(path: Path, group: str | None) -> Iterator[socket.socket]:
    """Whoever may open the file is asked again by the guard (SO_PEERCRED); systemd's has its SocketGroup."""
    if sock := systemd.inherited(path):
        with sock:
            yield sock
        return
    make_room_for(path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        os.chmod(path, 0o660)
        if group:
            try:
                os.chown(path, -1, grp.getgrnam(group).gr_gid)
            except (KeyError, PermissionError) as err:
                raise ConfigError(f"api.group {group!r} cannot have the socket: {err}") from err
        sock.listen(_BACKLOG)
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def _tls(settings: Settings) -> ssl.SSLContext | None:
    """Raises ConfigError for files that do not fit."""
    api = settings.api
    if api.tls_cert is None:
        if api.tls_client_ca or api.tls_key:
            raise ConfigError("api.tls_key and api.tls_client_ca need api.tls_cert")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(api.tls_cert, api.tls_key)
        if api.tls_client_ca:
            context.load_verify_locations(api.tls_client_ca)
            # Who comes without a certificate may still have a token.
            context.verify_mode = ssl.CERT_OPTIONAL
    except (OSError, ssl.SSLError) as err:
        raise ConfigError(f"api.tls_cert, tls_key or tls_client_ca cannot be used: {err}") from err
    return context
