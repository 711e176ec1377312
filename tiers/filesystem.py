"""A mounted file system as a store: NVMe, Lustre, BeeGFS, CephFS, NFS."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import secrets
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from anyio import to_thread

from forebay.core.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    DiskFull,
    ForebayError,
    ObjectChanged,
    ObjectNotFound,
    ShortBody,
    StoreError,
)
from forebay.tiers.store import Grant, ObjectInfo, Store, check_key

T = TypeVar("T")
TEMPORARY = ".forebay-tmp-"
# This process's own temporaries, told apart from a dead one's without asking a clock.
OWN_TEMPORARY = f"{TEMPORARY}{secrets.token_hex(4)}-"
_COPY_BYTES = 16 << 20
_PAGE = 1000
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1


class FilesystemStore(Store):
    """Everything below `root`. Objects appear by rename (or link, when they must be new)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"file://{root}"

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        with _translated(self.root):
            walk = _walk(self.root, prefix)
            while page := await _in_thread(lambda: list(itertools.islice(walk, _PAGE))):
                for info in page:
                    yield info

    async def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with _translated(path):
            return _info(key, await _in_thread(path.stat))

    async def read(self, info: ObjectInfo, start: int, end: int) -> memoryview:
        path = self._path(info.key)
        with _translated(path):
            return await _in_thread(_read, path, info, start, end)

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> ObjectInfo:
        def write(target: int) -> None:
            view = memoryview(data)
            while view:
                view = view[os.write(target, view) :]

        path = self._path(key)
        with _translated(path):
            return await _in_thread(_publish, key, path, write, if_absent)

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
        def write(target: int) -> None:
            with path.open("rb") as source:
                while os.sendfile(target, source.fileno(), None, _COPY_BYTES):
                    pass

        final = self._path(key)
        with _translated(final):
            if grant:
                await grant(path.stat().st_size)
            return await _in_thread(_publish, key, final, write, False)

    async def delete(self, key: str) -> None:
        path = self._path(key)
        with _translated(path):
            await _in_thread(lambda: path.unlink(missing_ok=True))

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)


async def _in_thread(call: Callable[..., T], *args: object) -> T:
    """A call to a file system that hangs is left behind when its time is up: it ends in its own time."""
    return await to_thread.run_sync(call, *args, abandon_on_cancel=True)


def _walk(root: Path, prefix: str) -> Iterator[ObjectInfo]:
    """In order of keys, a directory in memory at a time. Links to directories are not followed."""
    if not root.is_dir():
        raise BucketNotFound(f"{root} is not a directory")
    folder = prefix.rpartition("/")[0]
    if (root / folder).is_dir():
        yield from _walk_folder(root, f"{folder}/" if folder else "", prefix)


def _walk_folder(root: Path, folder: str, prefix: str) -> Iterator[ObjectInfo]:
    with os.scandir(root / folder) as entries:
        # `a.b` comes before `a/b`, as in an object store: a directory sorts with its `/`.
        names = sorted(
            f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
            for entry in entries
            if not entry.name.startswith(TEMPORARY)
        )
    for name in names:
        key = folder + name
        if name.endswith("/"):
            if key.startswith(prefix) or prefix.startswith(key):
                yield from _walk_folder(root, key, prefix)
        elif key.startswith(prefix) and (info := _listed(root, key)):
            yield info


def _listed(root: Path, key: str) -> ObjectInfo | None:
    """None for what is gone by now, a dangling link, a directory behind a link, a socket."""
    try:
        found = os.stat(root / key)
    except FileNotFoundError:
        return None
    return _info(key, found) if stat.S_ISREG(found.st_mode) else None


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    version = f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"
    return ObjectInfo(key, found.st_size, version, changed_at=found.st_mtime)


def _read(path: Path, info: ObjectInfo, start: int, end: int) -> memoryview:
    with path.open("rb") as file:
        before = _info(info.key, os.fstat(file.fileno()))
        if before.version != info.version:
            raise ObjectChanged(f"{path} was replaced or written to since it was listed")
        # pread makes its own buffer: a bytearray is zeroed under the GIL, numpy asks for huge pages.
        body = os.pread(file.fileno(), end - start, start)
        while len(body) < end - start:
            more = os.pread(file.fileno(), end - start - len(body), start + len(body))
            if not more:
                raise ShortBody(f"{path} ends at byte {start + len(body)}, expected {end}")
            body += more
        if _info(info.key, os.fstat(file.fileno())).version != info.version:
            raise ObjectChanged(f"{path} was written to while it was read")
    return memoryview(body)


def _publish(key: str, path: Path, write: Callable[[int], None], if_absent: bool) -> ObjectInfo:
    """Write to a temporary name, fsync, then make it visible; fsync the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    target = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        try:
            write(target)
            os.fsync(target)
            info = _info(key, os.fstat(target))
        finally:
            os.close(target)
        if if_absent:
            _link_new(temporary, path)
        else:
            temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return info


def _link_new(temporary: Path, path: Path) -> None:
    """A name that must be new, atomically; without links, by a renameat2(2) that does not replace."""
    try:
        os.link(temporary, path)
    except OSError as err:
        if err.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        _rename_new(temporary, path)


def _rename_new(temporary: Path, path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    here = ctypes.c_int(_AT_FDCWD)
    if libc.renameat2(here, os.fsencode(temporary), here, os.fsencode(path), _RENAME_NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def temporary_beside(path: Path) -> Path:
    """A name on the same file system that nobody else uses, recognised as ours by a later sweep."""
    return path.with_name(f"{OWN_TEMPORARY}{secrets.token_hex(8)}")


def sync_directory(path: Path) -> None:
    """Make renames in it survive a power cut (fsync(2))."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except ForebayError:
        raise
    except FileNotFoundError as err:
        raise ObjectNotFound(f"{path} is not there") from err
    except FileExistsError as err:
        raise AlreadyExists(f"{path} is there already") from err
    except PermissionError as err:
        raise AccessDenied(f"{path}: {err.strerror}", hint="check owner and mode") from err
    except OSError as err:
        raise os_error(err, path) from err


def os_error(err: OSError, path: Path) -> ForebayError:
    """A full disk by its own name, everything else as the tier's fault."""
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"no space left for {path}")
    return StoreError(f"{path}: {err.strerror or err}")
