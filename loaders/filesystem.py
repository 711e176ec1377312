"""`forebay://NAME/KEY`: the objects of a registered dataset as an fsspec file system, read from the hot tier.

For libraries that open files by URL (pandas, pyarrow, datasets, webdataset): what they read is staged by
stagerd once per node, verified, and mapped from NVMe. https://filesystem-spec.readthedocs.io
"""

from __future__ import annotations

import io
import os
from typing import Any, ClassVar

import fsspec

from forebay.core.errors import ForebayError, NotFound
from forebay.core.protocol import OpenDataset
from forebay.loaders.formats import Folder
from forebay.loaders.formats.format import BinaryView
from forebay.loaders.session import MappedShard, StagerSession


class ForebayFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Read only. NAME is what `forebay ls` shows; a dataset is registered by `forebay stage` or a loader."""

    protocol: ClassVar[str] = "forebay"
    cachable = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sessions: dict[tuple[int, str], StagerSession] = {}

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Raises FileNotFoundError."""
        name, key = self._split(path)
        session = self._session(name)
        number = session.number_of(key) if key else None
        if number is not None:
            return self._entry(f"{name}/{key}", session.size_bytes(number))
        if not key or any(other.startswith(f"{key}/") for other in session.keys):
            return {"name": f"{name}/{key}".rstrip("/"), "size": 0, "type": "directory"}
        raise FileNotFoundError(f"forebay://{name} has no object {key!r}")

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        name, key = self._split(path)
        session, prefix = self._session(name), f"{key}/" if key else ""
        found: dict[str, dict[str, Any]] = {}
        for number, other in enumerate(session.keys):
            if not other.startswith(prefix):
                continue
            below, _, deeper = other.removeprefix(prefix).partition("/")
            place = f"{name}/{prefix}{below}"
            if deeper:
                found.setdefault(place, {"name": place, "size": 0, "type": "directory"})
            else:
                found[place] = self._entry(place, session.size_bytes(number))
        if not found:
            found = {path: self.info(path)}
        return list(found.values()) if detail else sorted(found)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        shard = self._need(path)
        try:
            return bytes(shard.file.view[start:end])
        finally:
            shard.release()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> io.BufferedReader:
        if mode != "rb":
            raise NotImplementedError(f"forebay:// is read only, mode {mode!r} is not supported")
        return io.BufferedReader(_Leased(self._need(path)))

    def _need(self, path: str) -> MappedShard:
        name, key = self._split(path)
        session = self._session(name)
        number = session.number_of(key)
        if number is None:
            raise FileNotFoundError(f"forebay://{name} has no object {key!r}")
        try:
            return session.need(number)
        except ForebayError as err:
            raise OSError(f"forebay://{name}/{key} cannot be read: {err}") from err

    def _session(self, name: str) -> StagerSession:
        # A worker that was forked must not talk on its parent's connection.
        own = (os.getpid(), name)
        if own not in self._sessions:
            try:
                self._sessions[own] = StagerSession(OpenDataset(name), Folder(), (), None)
            except NotFound as err:
                raise FileNotFoundError(str(err)) from err
        return self._sessions[own]

    def _split(self, path: str) -> tuple[str, str]:
        name, _, key = str(self._strip_protocol(path)).strip("/").partition("/")
        return name, key

    @staticmethod
    def _entry(name: str, size_bytes: int) -> dict[str, Any]:
        return {"name": name, "size": size_bytes, "type": "file"}


class _Leased(BinaryView):
    """Its object stays in the hot tier until it is closed."""

    def __init__(self, shard: MappedShard) -> None:
        super().__init__(shard.file)
        self._shard = shard

    def close(self) -> None:
        self._shard.release()
        super().close()
