"""Store: where objects are. One small abstract class, one file per kind of store.

Keys are relative, `/`-separated names below the store's URL, checked at the door by `check_key`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from forebay.core.config import Settings
from forebay.core.errors import InvalidRequest

# Returns when so many bytes may move.
Grant = Callable[[int], Awaitable[None]]
_PLAIN_MD5 = re.compile(r"[0-9a-f]{32}")


class ObjectInfo(msgspec.Struct, frozen=True):
    """One object at one version.

    `version` changes whenever the bytes do: an ETag, a version id, or inode and mtime of a file.
    `md5` is set only where the store vouches for it; `changed_at` is what the store says, in seconds.
    """

    key: str
    size_bytes: int
    version: str
    md5: str | None = None
    changed_at: float = 0.0


class Store(ABC):
    """All methods raise kinds of StoreError, NotFound or IntegrityError, never a library's own."""

    url: str

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, in order of keys; directory markers left out."""

    @abstractmethod
    async def head(self, key: str) -> ObjectInfo:
        """Raises ObjectNotFound."""

    @abstractmethod
    async def read(self, info: ObjectInfo, start: int, end: int) -> memoryview:
        """Bytes [start, end) of exactly that version.

        Raises ObjectChanged when the object has another version by now, ShortBody when fewer came.
        """

    @abstractmethod
    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> ObjectInfo:
        """A small object at once. With `if_absent`, raises AlreadyExists when the key is there."""

    @abstractmethod
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
        """A file, in parts when it is large; visible upstream only when whole.

        `grant` is awaited before bytes go: for each part where parts are sent one by one, else at once.
        `resume`: a try that broke off, in whatever process, is gone on with where the store can; a record
        of it lies beside the file. `like` is a record of the last object that was put with it: parts that
        are the same are copied by the store itself, where it can, and the record is replaced.
        """

    async def abort_abandoned(self, prefix: str, older_s: float, ours: Callable[[str], bool]) -> int:
        """Give up uploads that were begun below `prefix` so long ago, of keys that are `ours`; how many."""
        return 0

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Nothing happens when the key is not there."""


def check_key(key: str) -> str:
    """Refuse names that could leave the store or that no file system can hold."""
    parts = key.split("/")
    if not key or key.startswith("/") or "\0" in key or ".." in parts or "." in parts:
        raise InvalidRequest(f"{key!r} is not a usable object name", hint="no `..`, no leading `/`, no NUL")
    return key


def md5_of_etag(etag: str | None) -> str | None:
    """The MD5 in a plain ETag; a multipart ETag (`...-3`) or any other token has none."""
    plain = (etag or "").strip('"').lower()
    return plain if _PLAIN_MD5.fullmatch(plain) else None


def normalize_url(url: str) -> str:
    """A path becomes file://..., a trailing `/` goes. Raises InvalidRequest for control characters."""
    if any(ord(char) < 32 or ord(char) == 127 for char in url):
        raise InvalidRequest(f"{url!r} has control characters in it")
    if "://" not in url:
        url = f"file://{Path(url).expanduser().absolute()}"
    return url.rstrip("/")


def open_store(url: str, settings: Settings) -> Store:
    """The store for everything below `url`. Nothing is contacted yet.

    Raises InvalidRequest for a scheme that nobody here can read.
    """
    url = normalize_url(url)
    scheme = urlsplit(url).scheme
    # Imported here: each backend brings a library that only its users should pay for.
    if scheme == "file":
        from forebay.tiers.filesystem import FilesystemStore

        return FilesystemStore(Path(url.removeprefix("file://")))
    if scheme in ("s3", "gs", "az", "abfs", "http", "https"):
        from forebay.tiers.objectstore import ObjectStore

        return ObjectStore(url, settings)
    from forebay.tiers.fsspec import FsspecStore

    return FsspecStore(url, settings)
