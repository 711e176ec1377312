"""After a crash: take stock of what a dead daemon left on a disk.

Temporaries go, interrupted files are counted, files that the catalog lost come back. Only regular
files with names that stagerd gives, below its own directory; damaged or unknown ones are dropped one
by one, and nothing here holds up the serving.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

import msgspec
import structlog
from anyio import to_thread

from forebay.stager.catalog import Catalog, Held
from forebay.stager.disk import HotDisk, blocks_bytes
from forebay.tiers.filesystem import OWN_TEMPORARY, TEMPORARY
from forebay.tiers.landing import PARTIAL, RECORD, XATTR, Note

log = structlog.get_logger()

_OBJECT_NAME = re.compile(r"[0-9a-f]{32}")


async def sweep(disk: HotDisk, catalog: Catalog) -> None:
    for folder in await to_thread.run_sync(_children, disk.root):
        if not stat.S_ISDIR(_mode(folder)):
            continue
        for path in await to_thread.run_sync(_children, folder):
            if stat.S_ISREG(_mode(path)):
                await _settle(path, disk, catalog)


async def _settle(path: Path, disk: HotDisk, catalog: Catalog) -> None:
    name = path.name
    if name.startswith(TEMPORARY):
        if not name.startswith(OWN_TEMPORARY):
            _remove(path)
    elif name.startswith(PARTIAL):
        object_id = name.removeprefix(PARTIAL).removesuffix(RECORD)
        if not _OBJECT_NAME.fullmatch(object_id) or disk.reserving(object_id):
            return
        if catalog.get(object_id) or not _mode(path.with_name(f"{PARTIAL}{object_id}")):
            _remove(path)
        elif not name.endswith(RECORD):
            disk.found_partial(object_id, blocks_bytes(path))
    elif _OBJECT_NAME.fullmatch(name) and not disk.reserving(name) and not catalog.get(name):
        held = await to_thread.run_sync(_described, path, disk.name)
        if held is None:
            _remove(path)
        elif not catalog.get(name) and not disk.reserving(name):
            disk.adopt(held)
            log.info("found again", object=name)


def _described(path: Path, disk: str) -> Held | None:
    """What a file says of itself, if it can be true. Of no boot: its bytes are compared before use."""
    try:
        note = msgspec.msgpack.decode(os.getxattr(path, XATTR, follow_symlinks=False), type=Note)
        found = path.lstat()
    except (OSError, msgspec.DecodeError):
        return None
    if found.st_size != note.size_bytes:
        return None
    return Held(
        id=path.name,
        disk=disk,
        tenant=note.tenant,
        size_bytes=note.size_bytes,
        blocks_bytes=found.st_blocks * 512,
        digest=note.digest,
        boot_id="",
        used_at=found.st_mtime,
        verified_at=0.0,
    )


def _remove(path: Path) -> None:
    """Aside first, so that a name in use later is never the one being removed."""
    aside = path.with_name(f"{TEMPORARY}swept-{secrets.token_hex(6)}")
    try:
        path.rename(aside)
        aside.unlink()
    except FileNotFoundError:
        return
    except OSError as err:
        log.warning("could not sweep", path=str(path), error=str(err))
        return
    log.info("swept", path=str(path))


def _mode(path: Path) -> int:
    """0 for what is gone: fetches and evictions go on meanwhile, and rename."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
