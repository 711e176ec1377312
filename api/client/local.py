"""The API without a server: the application in this process, asked as if over the wire."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from forebay.core.config import Settings

if TYPE_CHECKING:
    from forebay.api.rest.app import Api


def local_asgi(settings: Settings) -> Api:
    """It knows one caller, who could use the daemons' sockets as well."""
    # Imported here: the application's own routes use the client, for other nodes.
    from forebay.api.rest.app import Api

    return Api(settings, None)


class LocalTransport(httpx.BaseTransport):
    """For code that is not async: an event loop on a thread, which ends with `close`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open = ExitStack()
        self._portal: BlockingPortal | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self._portal is None:
            self._portal = self._open.enter_context(start_blocking_portal())
            self._api = local_asgi(self._settings)
            self._asgi = httpx.ASGITransport(self._api.asgi)
        return self._portal.call(self._handle, request)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        response = await self._asgi.handle_async_request(request)
        return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())

    def close(self) -> None:
        if self._portal:
            self._portal.call(self._api.aclose)
        self._open.close()
