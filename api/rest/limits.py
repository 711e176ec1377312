"""What one caller may ask: requests at once and per second, their size, the time to send them."""

from __future__ import annotations

import time
from collections import OrderedDict

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.api.auth.guard import principal_in
from forebay.api.rest.problems import problem
from forebay.core.config import ApiSettings
from forebay.core.errors import ForebayError, RequestTimeout, TooBusy, TooLarge, UnsupportedEncoding

_CALLERS = 4096
_BURST_S = 1.0


class Limits:
    """Below the guard: a caller is a principal there, and anonymous ones are told apart by address."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._settings = settings
        self._open = 0
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope)
            self._check_head(Headers(scope=scope))
            body = _Body(receive, self._settings.body, self._settings.receive_s)
            # Read before the route runs: what is too long or too slow never gets further.
            await body.read()
        except ForebayError as err:
            await problem(err)(scope, receive, send)
            return
        except _Gone:
            return
        self._open += 1
        try:
            await self._app(scope, body.replay, send)
        finally:
            self._open -= 1

    def _admit(self, scope: Scope) -> None:
        # Followers of jobs have a limit of their own (rest.events).
        if self._open >= self._settings.concurrency + self._settings.streams:
            raise TooBusy(f"{self._open} requests are being answered already")
        if not self._settings.rate:
            return
        who = principal_in(scope).name
        caller = f"{who} {(scope.get('client') or ('', 0))[0]}"
        bucket = self._buckets.pop(caller, None) or _Bucket(self._settings.rate * _BURST_S)
        self._buckets[caller] = bucket
        if len(self._buckets) > _CALLERS:
            self._buckets.popitem(last=False)
        if not bucket.take(self._settings.rate):
            raise TooBusy(f"{who} sends more than {self._settings.rate:g} requests per second")

    def _check_head(self, headers: Headers) -> None:
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise UnsupportedEncoding("a request is taken as it is, not compressed")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._settings.body:
            raise TooLarge(f"a request of {length} bytes; at most {self._settings.body} are taken")


class _Bucket:
    def __init__(self, size: float) -> None:
        self._size = self._left = size
        self._at = time.monotonic()

    def take(self, rate: float) -> bool:
        now = time.monotonic()
        self._left = min(self._size, self._left + (now - self._at) * rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _Gone(Exception):
    """The caller hung up before the request was whole."""


class _Body:
    """The request's body, read in its time and to its limit, then handed on."""

    def __init__(self, receive: Receive, most_bytes: int, within_s: float) -> None:
        self._receive = receive
        self._most_bytes = most_bytes
        self._within_s = within_s
        self._parts: list[bytes] = []
        self._handed = False

    async def read(self) -> None:
        size = 0
        try:
            with anyio.fail_after(self._within_s):
                more = True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    self._parts.append(message.get("body", b""))
                    size += len(self._parts[-1])
                    if size > self._most_bytes:
                        raise TooLarge(f"at most {self._most_bytes} bytes are taken")
                    more = message.get("more_body", False)
        except TimeoutError as err:
            raise RequestTimeout(f"the request did not come within {self._within_s:g} s") from err

    async def replay(self) -> Message:
        if self._handed:
            return await self._receive()
        self._handed = True
        return {"type": "http.request", "body": b"".join(self._parts), "more_body": False}
