"""Any other URL through fsspec (s3fs among them: write `s3fs://bucket/prefix`)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
from anyio import to_thread

from forebay.core.config import Settings
from forebay.core.errors import (
    AccessDenied,
    AlreadyExists,
    InvalidRequest,
    ObjectChanged,
    ObjectNotFound,
    ShortBody,
    StoreError,
    StoreUnreachable,
)
from forebay.tiers.store import Grant, ObjectInfo, Store, check_key, md5_of_etag


class FsspecStore(Store):
    """fsspec's synchronous face, in threads.

    fsspec knows no conditional read: the version is compared before and after each range, so a
    replaced object is noticed, at the price of a second request. It knows no conditional put
    either: `if_absent` looks first, which two writers at once can both pass.
    """

    def __init__(self, url: str, settings: Settings) -> None:
        self.url = url
        parts = urlsplit(url)
        protocol = "s3" if parts.scheme == "s3fs" else parts.scheme
        options: dict[str, Any] = {}
        if protocol == "s3":
            endpoint = settings.s3.endpoint or os.environ.get("AWS_ENDPOINT_URL")
            options = {"anon": settings.s3.anonymous, "client_kwargs": {"endpoint_url": endpoint}}
        try:
            self._fs = fsspec.filesystem(protocol, use_listings_cache=False, **options)
        except (ValueError, ImportError) as err:
            raise InvalidRequest(f"{url}: {err}") from err
        self._root = f"{parts.netloc}{parts.path}".rstrip("/")

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        with self._translated(prefix):
            found = await to_thread.run_sync(
                lambda: self._fs.find(f"{self._root}/{folder}".rstrip("/"), detail=True)
            )
        for path in sorted(found):
            key = path.lstrip("/").removeprefix(self._root.lstrip("/")).lstrip("/")
            if key.startswith(prefix) and found[path]["type"] == "file":
                yield _info(key, found[path])

    async def head(self, key: str) -> ObjectInfo:
        with self._translated(key):
            return _info(key, await to_thread.run_sync(self._fs.info, self._path(key)))

    async def read(self, info: ObjectInfo, start: int, end: int) -> memoryview:
        with self._translated(info.key):
            # By name: the order of these arguments differs between file systems.
            cat = partial(self._fs.cat_file, self._path(info.key), start=start, end=end)
            body = await to_thread.run_sync(cat)
        now = await self.head(info.key)
        if now.version != info.version:
            raise ObjectChanged(f"{self.url}/{info.key} is now {now.version}, was {info.version}")
        if len(body) != end - start:
            raise ShortBody(f"{self.url}/{info.key}: {len(body)} bytes came instead of {end - start}")
        return memoryview(body)

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> ObjectInfo:
        with self._translated(key):
            if if_absent and await to_thread.run_sync(self._fs.exists, self._path(key)):
                raise AlreadyExists(f"{self.url}/{key} is there already")
            await to_thread.run_sync(self._fs.pipe_file, self._path(key), data)
        return await self.head(key)

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
        with self._translated(key):
            if grant:
                await grant(path.stat().st_size)
            await to_thread.run_sync(self._fs.put_file, str(path), self._path(key))
        return await self.head(key)

    async def delete(self, key: str) -> None:
        with self._translated(key):
            if await to_thread.run_sync(self._fs.exists, self._path(key)):
                await to_thread.run_sync(self._fs.rm_file, self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        where = f"{self.url}/{key}" if key else self.url
        try:
            yield
        except FileNotFoundError as err:
            raise ObjectNotFound(f"{where} is not there") from err
        except PermissionError as err:
            raise AccessDenied(f"{where}: {err}") from err
        except (ConnectionError, TimeoutError) as err:
            raise StoreUnreachable(f"{where}: {err}") from err
        except OSError as err:
            raise StoreError(f"{where}: {err}") from err


def _info(key: str, detail: dict[str, Any]) -> ObjectInfo:
    etag = detail.get("ETag") or detail.get("etag")
    changed = detail.get("mtime") or detail.get("LastModified") or detail.get("created")
    size_bytes = int(detail["size"])
    return ObjectInfo(key, size_bytes, etag or f"{changed}-{size_bytes}", md5_of_etag(etag))
