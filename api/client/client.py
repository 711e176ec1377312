"""The two clients. Both raise the errors of core.errors that the API told as problem details."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec
from tenacity import AsyncRetrying, Retrying, retry_if_exception_type, stop_after_delay
from tenacity import wait_exponential_jitter as growing_pause

from forebay.api.client import calls
from forebay.api.client.calls import Call
from forebay.api.client.local import LocalTransport, local_asgi
from forebay.api.resources import PROBLEM_TYPE, Page, ProblemDetails
from forebay.api.trust import trust
from forebay.core.config import Settings
from forebay.core.errors import (
    DaemonUnavailable,
    ForebayError,
    ProtocolError,
    TooBusy,
    WaitTimeout,
    from_code,
)
from forebay.core.protocol import StageJob

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R", Retrying, AsyncRetrying)

URL_VARIABLE = "FOREBAY_API_URL"
TOKEN_VARIABLE = "FOREBAY_API_TOKEN"
CA_VARIABLE = "FOREBAY_API_CA"
CERT_VARIABLE = "FOREBAY_API_CERT"
_HERE = "http://localhost"
_POLL_S = 10.0
_AWAY_S = 60.0


def _method(call: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    def send(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(call(*args, **kwargs))

    send.__doc__ = call.__doc__
    return send


def _async_method(
    call: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def send(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(call(*args, **kwargs))

    send.__doc__ = call.__doc__
    return send


class Client:
    """Of the API at `url` (`http://...`, `https://...`, `unix:///path`), else FOREBAY_API_URL.

    Without either it asks the daemons of this node over their sockets, with the rights of this user; no
    API has to run then. `token`: default FOREBAY_API_TOKEN. `ca_file`: certificates (PEM) to trust, default
    FOREBAY_API_CA. `cert_file`: a certificate and its key (PEM) to be known by, default FOREBAY_API_CERT.
    `patience_s`: how long a service that is away or too busy is asked again; what changes something is sent
    under a key, so that it is done once.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        settings: Settings | None = None,
        patience_s: float = 0.0,
    ) -> None:
        place = _place(url)
        if place is None:
            transport: httpx.BaseTransport = LocalTransport(settings or Settings.load())
        else:
            transport = httpx.HTTPTransport(uds=_socket_of(place), verify=_verify(ca_file, cert_file))
        self._http = httpx.Client(base_url=_base(place), headers=_headers(token), transport=transport)
        self._patience_s = patience_s

    def send(self, call: Call[T]) -> T:
        """Raises what the API answered; DaemonUnavailable when it does not answer."""
        found: T = _insisting(Retrying, self._patience_s)(self._once, call)
        return found

    def _once(self, call: Call[T]) -> T:
        try:
            return _read(call, self._http.send(self._http.build_request(**_request(call))))
        except httpx.HTTPError as err:
            raise _unreachable(err) from err

    def all(self, call: Call[Page[T]]) -> Iterator[T]:
        """The items of every page: `client.all(calls.shards("digits"))`."""
        while True:
            page = self.send(call)
            yield from page.items
            if page.next_cursor is None:
                return
            call = call.after(page.next_cursor)

    def wait(self, job: StageJob, on_progress: Callable[[StageJob], None] = lambda job: None) -> StageJob:
        """The job at its end, whoever is restarted meanwhile; DaemonUnavailable after a minute away."""
        while job.state == "running":
            call = calls.job(job.id, after=job.version, wait_s=_POLL_S)
            job = _insisting(Retrying, max(_AWAY_S, self._patience_s))(self._once, call)
            on_progress(job)
        return job

    datasets = _method(calls.datasets)
    dataset = _method(calls.dataset)
    register = _method(calls.register)
    evict = _method(calls.evict)
    shards = _method(calls.shards)
    jobs = _method(calls.jobs)
    stage = _method(calls.stage)
    job = _method(calls.job)
    cancel = _method(calls.cancel)
    retry = _method(calls.retry)
    pins = _method(calls.pins)
    pin = _method(calls.pin)
    unpin = _method(calls.unpin)
    tiers = _method(calls.tiers)
    overview = _method(calls.overview)
    lockstep = _method(calls.lockstep)
    node = _method(calls.node)
    nodes = _method(calls.nodes)
    stage_on = _method(calls.stage_on)
    problems = _method(calls.problems)
    saves = _method(calls.saves)
    checkpoints = _method(calls.checkpoints)
    checkpoint = _method(calls.checkpoint)
    verify = _method(calls.verify)
    remove = _method(calls.remove)
    pin_checkpoint = _method(calls.pin_checkpoint)
    unpin_checkpoint = _method(calls.unpin_checkpoint)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """The same for async code; it belongs to one event loop."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        settings: Settings | None = None,
        patience_s: float = 0.0,
    ) -> None:
        place = _place(url)
        if place is None:
            api = local_asgi(settings or Settings.load())
            transport: httpx.AsyncBaseTransport = httpx.ASGITransport(api.asgi)
        else:
            transport = httpx.AsyncHTTPTransport(uds=_socket_of(place), verify=_verify(ca_file, cert_file))
        self._http = httpx.AsyncClient(base_url=_base(place), headers=_headers(token), transport=transport)
        self._patience_s = patience_s

    async def send(self, call: Call[T]) -> T:
        """As Client.send."""
        return await _insisting(AsyncRetrying, self._patience_s)(self._once, call)

    async def _once(self, call: Call[T]) -> T:
        try:
            return _read(call, await self._http.send(self._http.build_request(**_request(call))))
        except httpx.HTTPError as err:
            raise _unreachable(err) from err

    async def all(self, call: Call[Page[T]]) -> AsyncIterator[T]:
        """As Client.all."""
        while True:
            page = await self.send(call)
            for item in page.items:
                yield item
            if page.next_cursor is None:
                return
            call = call.after(page.next_cursor)

    async def wait(
        self, job: StageJob, on_progress: Callable[[StageJob], None] = lambda job: None
    ) -> StageJob:
        """As Client.wait."""
        while job.state == "running":
            call = calls.job(job.id, after=job.version, wait_s=_POLL_S)
            job = await _insisting(AsyncRetrying, max(_AWAY_S, self._patience_s))(self._once, call)
            on_progress(job)
        return job

    datasets = _async_method(calls.datasets)
    dataset = _async_method(calls.dataset)
    register = _async_method(calls.register)
    evict = _async_method(calls.evict)
    shards = _async_method(calls.shards)
    jobs = _async_method(calls.jobs)
    stage = _async_method(calls.stage)
    job = _async_method(calls.job)
    cancel = _async_method(calls.cancel)
    retry = _async_method(calls.retry)
    pins = _async_method(calls.pins)
    pin = _async_method(calls.pin)
    unpin = _async_method(calls.unpin)
    tiers = _async_method(calls.tiers)
    overview = _async_method(calls.overview)
    lockstep = _async_method(calls.lockstep)
    node = _async_method(calls.node)
    nodes = _async_method(calls.nodes)
    stage_on = _async_method(calls.stage_on)
    problems = _async_method(calls.problems)
    saves = _async_method(calls.saves)
    checkpoints = _async_method(calls.checkpoints)
    checkpoint = _async_method(calls.checkpoint)
    verify = _async_method(calls.verify)
    remove = _async_method(calls.remove)
    pin_checkpoint = _async_method(calls.pin_checkpoint)
    unpin_checkpoint = _async_method(calls.unpin_checkpoint)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


_PASSING = (DaemonUnavailable, TooBusy)


def _insisting(kind: type[R], patience_s: float) -> R:
    """Asks again while the service is away or too busy."""
    return kind(
        stop=stop_after_delay(patience_s),
        wait=growing_pause(multiplier=0.1, max=2.0),
        retry=retry_if_exception_type(_PASSING),
        reraise=True,
    )


def _place(url: str | None) -> str | None:
    return url or os.environ.get(URL_VARIABLE) or None


def _socket_of(place: str) -> str | None:
    parts = urlsplit(place)
    return parts.path if parts.scheme == "unix" else None


def _base(place: str | None) -> str:
    return _HERE if place is None or _socket_of(place) else place


def _verify(ca_file: Path | None, cert_file: Path | None) -> ssl.SSLContext | bool:
    return trust(ca_file or _path_in(CA_VARIABLE), cert_file or _path_in(CERT_VARIABLE))


def _path_in(variable: str) -> Path | None:
    text = os.environ.get(variable)
    return Path(text) if text else None


def _headers(token: str | None) -> dict[str, str]:
    text = token or os.environ.get(TOKEN_VARIABLE)
    return {"Authorization": f"Bearer {text}"} if text else {}


def _request(call: Call[Any]) -> dict[str, Any]:
    headers = {"Idempotency-Key": call.key} if call.key else {}
    return {
        "method": call.method, "url": call.path, "params": call.params, "json": call.body, "headers": headers,
        "timeout": call.timeout_s,
    }  # fmt: skip


def _read(call: Call[T], response: httpx.Response) -> T:
    if response.is_success:
        if call.kind is None:
            return None  # type: ignore[return-value]
        return msgspec.json.decode(response.content, type=call.kind)  # type: ignore[no-any-return]
    raise _error(response)


def _error(response: httpx.Response) -> ForebayError:
    if response.headers.get("content-type", "").startswith(PROBLEM_TYPE):
        found = msgspec.json.decode(response.content, type=ProblemDetails)
        return from_code(found.title, found.detail, found.hint)
    return ProtocolError(f"{response.url} answered {response.status_code}: is a Forebay API there?")


def _unreachable(err: httpx.HTTPError) -> ForebayError:
    try:
        place = str(err.request.url)
    except RuntimeError:
        place = "the API"
    if isinstance(err, httpx.ReadTimeout):
        return WaitTimeout(f"{place} did not answer in time")
    return DaemonUnavailable(f"no answer from {place}: {err}", hint="is `forebay serve api` running there?")
