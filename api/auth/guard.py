"""At the door: who sends this request. Found once, before anything reads its body."""

from __future__ import annotations

import grp
import os
import pwd
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.api.auth.oidc import Oidc
from forebay.api.auth.principal import ANONYMOUS, OWNER, Principal, scopes_of
from forebay.api.auth.tokens import TokenBook
from forebay.api.rest.problems import problem
from forebay.core.config import Settings
from forebay.core.errors import Forbidden, ForebayError, Unauthorized

COOKIE = "forebay_token"
_KEY, _GUARD = "forebay.principal", "forebay.guard"
_OPEN = ("/healthz", "/readyz", "/login", "/logout")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def principal_in(scope: Scope) -> Principal:
    """Whom the guard found."""
    found = scope[_KEY]
    assert isinstance(found, Principal)
    return found


class Guard:
    """By Unix socket, bearer token, cookie, client certificate, or by nothing on loopback, in this order."""

    def __init__(self, app: ASGIApp, settings: Settings, tokens: TokenBook | None, *, alone: bool) -> None:
        """`tokens` None: this process is the only caller. `alone`: nobody listens beyond loopback."""
        self._app = app
        self._settings = settings
        self._tokens = tokens
        self._alone = alone
        self._oidc = Oidc(settings.api.oidc) if settings.api.oidc else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_GUARD] = self
        try:
            scope[_KEY] = await self._who(scope)
        except ForebayError as err:
            # A person is shown where to say who they are.
            door = (
                RedirectResponse("/login", 303)
                if scope["path"] == "/" and err.status == 401
                else problem(err)
            )
            await door(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _who(self, scope: Scope) -> Principal:
        if self._tokens is None:
            return OWNER
        headers = Headers(scope=scope)
        host, _ = scope.get("client") or ("", 0)
        if host.startswith("unix:"):
            return self._of_peer(host)
        self._check_browser(scope["method"], headers)
        if scope["path"] in _OPEN or scope["path"].startswith("/static/"):
            # Whatever they hold: an old cookie must not shut the door to a new one.
            return Principal("anonymous", frozenset())
        if text := _bearer(headers) or _cookie(headers):
            return await self.of_token(text)
        if host.startswith("cert:"):
            return self._of_certificate(host.removeprefix("cert:"))
        if self._alone and self._settings.api.anonymous:
            return ANONYMOUS
        raise Unauthorized("this needs a token")

    async def of_token(self, text: str) -> Principal:
        """Raises Unauthorized."""
        if self._oidc and not text.startswith("fb_"):
            return await self._oidc.check(text)
        if self._tokens is None:
            raise Unauthorized("no tokens are known here")
        return self._tokens.check(text)

    def _of_peer(self, peer: str) -> Principal:
        """`unix:UID:GID` (SO_PEERCRED, unix(7)): the daemons' user may all, its group what is set."""
        uid, gid = (int(part) for part in peer.split(":")[1:3])
        if uid in (0, os.geteuid()):
            return OWNER
        if self._settings.api.group and self._settings.api.group in _groups(uid, gid):
            return Principal(f"uid:{uid}", scopes_of(self._settings.api.group_scopes))
        raise Forbidden(
            f"user {uid} may not use this socket", hint="api.group names a group that may; or use a token"
        )

    def _of_certificate(self, name: str) -> Principal:
        for client in self._settings.api.client:
            if client.name == name:
                return Principal(f"cert:{name}", scopes_of(client.scopes), client.tenant)
        raise Forbidden(f"the certificate of {name!r} is not listed", hint="add it as [[api.client]]")

    def _check_browser(self, method: str, headers: Headers) -> None:
        """A page of another site must not reach us under its own name (DNS rebinding) or send for the viewer.

        https://owasp.org/www-community/attacks/csrf
        """
        host = headers.get("host", "")
        if self._alone and _name(host) not in (
            *_LOOPBACK,
            self._settings.api.host,
            *self._settings.api.names,
        ):
            raise Forbidden(
                f"this API is not called {_name(host)!r}", hint="use 127.0.0.1, or add it to api.names"
            )
        origin = headers.get("origin")
        if origin is not None and method not in SAFE_METHODS and urlsplit(origin).netloc != host:
            raise Forbidden(f"a page of {origin} may not send this")


def _bearer(headers: Headers) -> str | None:
    kind, _, text = headers.get("authorization", "").partition(" ")
    if not kind:
        return None
    if kind.lower() != "bearer" or not text.strip():
        raise Unauthorized("the Authorization header is not of the kind Bearer")
    return text.strip()


def _cookie(headers: Headers) -> str | None:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return found.value if found else None


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return host


def _groups(uid: int, gid: int) -> set[str]:
    try:
        user = pwd.getpwuid(uid)
        ids = os.getgrouplist(user.pw_name, gid)
    except KeyError:
        ids = [gid]
    found = set()
    for number in ids:
        try:
            found.add(grp.getgrgid(number).gr_name)
        except KeyError:
            found.add(str(number))
    return found
