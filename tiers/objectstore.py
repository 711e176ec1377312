"""s3://, gs://, az://, http(s):// through obstore (Rust object_store)."""

from __future__ import annotations

import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import obstore
from anyio import to_thread
from obstore import exceptions as obs
from obstore.store import AzureStore, GCSStore, S3Store, from_url

from forebay.core.config import Settings, SourceSettings
from forebay.core.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    ConfigError,
    ForebayError,
    InvalidRequest,
    ObjectChanged,
    ObjectNotFound,
    ShortBody,
    StoreBusy,
    StoreError,
    StoreUnreachable,
)
from forebay.tiers.credentials import credential_provider
from forebay.tiers.multipart import Multipart
from forebay.tiers.store import Grant, ObjectInfo, Store, check_key, md5_of_etag

_STATUS = re.compile(r"status code: (\d{3})")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_S3_CODE = re.compile(r"<Code>(\w+)</Code>")
_S3_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_UPLOAD_PARTS = 4
SIGNABLE = (S3Store, GCSStore, AzureStore)
_ASK_AGAIN_S = 1.0


class ObjectStore(Store):
    """One bucket, or the part of it below a prefix."""

    def __init__(self, url: str, settings: Settings) -> None:
        self.url = url
        parts = urlsplit(url)
        if not parts.netloc:
            raise InvalidRequest(f"{url} names no bucket", hint="for example s3://bucket/prefix")
        self._endpoint = settings.s3.endpoint or os.environ.get("AWS_ENDPOINT_URL") or parts.scheme
        self._asked_at = -_ASK_AGAIN_S
        self._timeout_s = settings.transfer.attempt_timeout_s
        source = settings.source_of(url)
        self._settings = settings
        self._parts: Multipart | None = None
        options: dict[str, Any] = {
            "client_options": {
                "timeout": timedelta(seconds=self._timeout_s),
                "connect_timeout": timedelta(seconds=5),
                "allow_http": self._endpoint.startswith("http://") or parts.scheme == "http",
                **_client_options(source),
            },
            # Forebay's own transfer retries, so that one place counts and paces them.
            "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=self._timeout_s)},
        }
        if parts.scheme == "s3":
            options |= _s3_options(settings, source)
        try:
            self._store = from_url(url, **options)
        except (obs.BaseError, ValueError) as err:
            raise InvalidRequest(f"{url}: {_first_line(err)}") from err

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        with self._translated(prefix):
            # object_store lists whole path segments only, so a prefix inside a name is filtered here.
            folder = prefix.rpartition("/")[0]
            async for page in obstore.list(self._store, folder or None, chunk_size=1000):
                for meta in page:
                    if meta["path"].startswith(prefix) and not meta["path"].endswith("/"):
                        yield _info(meta)

    async def head(self, key: str) -> ObjectInfo:
        with self._translated(key):
            return _info(await obstore.head_async(self._store, check_key(key)))

    async def read(self, info: ObjectInfo, start: int, end: int) -> memoryview:
        etag = info.version if info.version.startswith('"') else None
        options: obstore.GetOptions = {"if_match": etag} if etag else {}
        if (start, end) != (0, info.size_bytes):
            options["range"] = (start, end)
        try:
            return await self._read(info, start, end, etag, options)
        except StoreBusy as err:
            raise StoreBusy(err.message, retry_after_s=await self._retry_after(info.key)) from err

    async def _read(
        self, info: ObjectInfo, start: int, end: int, etag: str | None, options: obstore.GetOptions
    ) -> memoryview:
        with self._translated(info.key):
            reply = await obstore.get_async(self._store, info.key, options=options)
            # Also for servers that pass over If-Match, and by time and size for those without ETags.
            found = _info(reply.meta if etag else {**reply.meta, "e_tag": None})
            if etag and reply.meta["e_tag"] is None:
                found = msgspec.structs.replace(found, version=etag)
            if etag and found.version == info.version and found.size_bytes != info.size_bytes:
                raise ShortBody(f"{self.url}/{info.key}: the server announced {found.size_bytes} bytes")
            if (found.version, found.size_bytes) != (info.version, info.size_bytes):
                raise _changed(self.url, info, f"{found.version} of {found.size_bytes} bytes")
            body = memoryview(await reply.bytes_async())
        if len(body) != end - start:
            raise ShortBody(
                f"{self.url}/{info.key}: {len(body)} bytes came instead of {end - start} from byte {start}"
            )
        return body

    async def _retry_after(self, key: str) -> float | None:
        """How long the server wants to be left alone. obstore hides the header, so it is asked for once."""
        if time.monotonic() - self._asked_at < _ASK_AGAIN_S or not isinstance(self._store, SIGNABLE):
            return None
        self._asked_at = time.monotonic()
        try:
            url = await obstore.sign_async(self._store, "HEAD", key, timedelta(seconds=60))
            return await to_thread.run_sync(_asked_to_wait, url, abandon_on_cancel=True)
        except (obs.BaseError, OSError, ValueError):
            return None

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> ObjectInfo:
        with self._translated(key):
            result = await obstore.put_async(
                self._store,
                check_key(key),
                data,
                mode="create" if if_absent else "overwrite",
                use_multipart=False,
            )
        return _put_info(key, len(data), result)

    async def put_file(
        self,
        key: str,
        path: Path,
        *,
        part_bytes: int,
        grant: Grant | None = None,
        resume: bool = False,
        like: Path | None = None,
    ) -> ObjectInfo:
        size_bytes = path.stat().st_size
        large = size_bytes > part_bytes
        if large and resume and (multipart := self._multipart()):
            return await multipart.put(key, path, part_bytes, grant, like)
        if grant and not large:
            await grant(size_bytes)
        with self._translated(key):
            result = await obstore.put_async(
                self._store,
                check_key(key),
                _granted_parts(path, part_bytes, grant) if grant and large else path,
                use_multipart=large,
                chunk_size=part_bytes,
                max_concurrency=_UPLOAD_PARTS,
            )
        return _put_info(key, size_bytes, result)

    async def abort_abandoned(self, prefix: str, older_s: float, ours: Callable[[str], bool]) -> int:
        multipart = self._multipart()
        return await multipart.abandoned(prefix, older_s, ours) if multipart else 0

    def _multipart(self) -> Multipart | None:
        """For S3, where botocore is installed."""
        if self._parts is None and isinstance(self._store, S3Store) and not self._settings.s3.anonymous:
            parts = urlsplit(self.url)
            source = self._settings.source_of(self.url)
            with suppress(ImportError):
                self._parts = Multipart(self.url, parts.netloc, parts.path.strip("/"), self._settings, source)
        return self._parts

    async def delete(self, key: str) -> None:
        with self._translated(key):
            try:
                await obstore.delete_async(self._store, check_key(key))
            except FileNotFoundError:
                return

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """obstore's exceptions as ours, with URL, cause and remedy."""
        where = f"{self.url}/{key}" if key else self.url
        try:
            yield
        except FileNotFoundError as err:
            raise ObjectNotFound(f"{where} is not there") from err
        except obs.AlreadyExistsError as err:
            raise AlreadyExists(f"{where} is there already") from err
        except obs.PreconditionError as err:
            raise ObjectChanged(f"{where} was replaced while it was being read") from err
        except (obs.PermissionDeniedError, obs.UnauthenticatedError) as err:
            raise AccessDenied(f"{where}: {_reason(err)}") from err
        except obs.BaseError as err:
            raise self._generic(where, err) from err
        except (OSError, TimeoutError) as err:
            raise StoreUnreachable(f"{where}: {_first_line(err)}") from err

    def _generic(self, where: str, err: obs.BaseError) -> ForebayError:
        text = str(err)
        status = int(found[1]) if (found := _STATUS.search(text)) else None
        if "NoSuchBucket" in text:
            return BucketNotFound(f"{where}: there is no such bucket")
        if status in (401, 403):
            return AccessDenied(f"{where}: {_reason(err)}")
        if status in (408, 429) or (status or 0) >= 500:
            return StoreBusy(f"{where}: the server answered {status}")
        if status is not None:
            return StoreError(f"{where}: {_reason(err)}")
        if found := _CERTIFICATE.search(text):
            return StoreUnreachable(
                f"{where}: the certificate of {self._endpoint} is not trusted ({found[1]})",
                hint="name the authority's certificates in ca_file of the [[source]]",
            )
        if "error sending request" in text or "connect" in text.lower() or "timed out" in text.lower():
            return StoreUnreachable(f"{where}: no answer from {self._endpoint}")
        if "body" in text.lower() or "decod" in text.lower():
            return ShortBody(f"{where}: the transfer broke off ({_first_line(err)})")
        return StoreError(f"{where}: {_first_line(err)}")


async def _granted_parts(path: Path, part_bytes: int, grant: Grant) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while part := await to_thread.run_sync(file.read, part_bytes):
            await grant(len(part))
            yield part


def _asked_to_wait(url: str) -> float | None:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=2).close()
    except urllib.error.HTTPError as err:
        asked = err.headers.get("Retry-After", "")
        return float(asked) if asked.isdigit() else None
    return None


def _client_options(source: SourceSettings) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if source.proxy:
        options["proxy_url"] = source.proxy
    if source.ca_file:
        try:
            options["root_certificate"] = source.ca_file.read_bytes()
        except OSError as err:
            raise ConfigError(f"ca_file {source.ca_file} of {source.url}: {err.strerror}") from err
    return options


def _s3_options(settings: Settings, source: SourceSettings) -> dict[str, Any]:
    """What beats the AWS_* environment, which obstore reads by itself."""
    options: dict[str, Any] = {"region": settings.s3.region or os.environ.get("AWS_REGION", "us-east-1")}
    if settings.s3.endpoint:
        options["endpoint"] = settings.s3.endpoint
    if settings.s3.anonymous:
        options["skip_signature"] = True
    elif provider := credential_provider(source.profile):
        options["credential_provider"] = provider
    if source.requester_pays:
        options["request_payer"] = True
    return options


def _info(meta: Any) -> ObjectInfo:
    etag = meta["e_tag"]
    version = etag or meta["version"] or f"{meta['last_modified'].timestamp():.6f}-{meta['size']}"
    changed_at = meta["last_modified"].timestamp()
    return ObjectInfo(meta["path"], meta["size"], version, md5_of_etag(etag), changed_at)


def _put_info(key: str, size_bytes: int, result: Any) -> ObjectInfo:
    etag = result["e_tag"]
    return ObjectInfo(key, size_bytes, etag or result["version"] or "", md5_of_etag(etag))


def _changed(url: str, info: ObjectInfo, found: str) -> ObjectChanged:
    return ObjectChanged(f"{url}/{info.key} is now {found}, was {info.version} when it was listed")


def _first_line(err: BaseException) -> str:
    return str(err).strip().splitlines()[0][:300] if str(err).strip() else type(err).__name__


def _reason(err: BaseException) -> str:
    """S3's own code and message, without the debug dump around them."""
    code, message = _S3_CODE.search(str(err)), _S3_MESSAGE.search(str(err))
    if code:
        return f"{code[1]}: {message[1]}" if message and message[1] else code[1]
    return _first_line(err)
