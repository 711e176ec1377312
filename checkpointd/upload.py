"""A rank's file from the spool to upstream, verified, then its manifest."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio import to_thread

from forebay.checkpointd import layout
from forebay.checkpointd.attempts import Attempt
from forebay.checkpointd.layout import FileRecord
from forebay.checkpointd.spool import behind_the_trainer
from forebay.core.config import CheckpointSettings
from forebay.core.errors import DigestMismatch, ObjectNotFound, StoreUnreachable
from forebay.core.failpoint import failpoint
from forebay.tiers.digest import StreamDigest
from forebay.tiers.md5 import object_etag
from forebay.tiers.multipart import compared
from forebay.tiers.store import Grant, ObjectInfo, Store
from forebay.tiers.transfer import retrying

log = structlog.get_logger()

# Together with the jittered waits this outlasts upload_timeout_s, which is the real limit.
_MANY = 1_000_000
# The ETag of an object that was put in parts.
_IN_PARTS = re.compile(r"[0-9a-f]{32}-\d+")
# What arrived as something else, or is said to have.
_SENT_AGAIN = 2
_READ_BACK_BYTES = 16 << 20


async def upload(
    store: Store, attempt: Attempt, folder: Path, policy: CheckpointSettings, grant: Grant
) -> None:
    """Until upstream holds the file and says so. Tried again through outages, up to upload_timeout_s.

    Raises StoreError kinds, DigestMismatch, StoreUnreachable at the time limit.
    """
    prefix = layout.folder(attempt.run, attempt.step, attempt.attempt)
    name = layout.rank_manifest(attempt.rank)

    async def manifest() -> None:
        await store.put(f"{prefix}/{name}", (folder / name).read_bytes())

    with anyio.move_on_after(policy.upload_timeout_s) as limit:
        manifest_here = layout.read_manifest(folder / name)
        for record in manifest_here.files:
            # Of the run, not of this attempt: what the next one is compared with.
            like = folder.parents[1] / f"sent-{record.name}.json" if manifest_here.about.reuse else None
            await _upload_file(store, prefix, folder, record, policy.part_bytes, grant, like)
        failpoint("upload.put")
        await retrying(manifest, _MANY)
        failpoint("upload.manifested")
    if limit.cancelled_caught:
        raise StoreUnreachable(
            f"{store.url} did not take {prefix} within {policy.upload_timeout_s:g} s",
            hint="it stays in the spool; the next start of checkpointd tries again",
        )


async def _upload_file(
    store: Store,
    prefix: str,
    folder: Path,
    record: FileRecord,
    part_bytes: int,
    grant: Grant,
    like: Path | None,
) -> None:
    """Put and verified; what a crash left whole upstream is not put again (C9)."""
    key, path = f"{prefix}/{record.name}", folder / record.name
    expected = partial(object_etag, path, part_bytes)
    # It will be wanted, and can be had while the bytes go up; with `like` each part is compared instead.
    etag = _beside(expected) if store.url.startswith("s3:") and like is None else expected

    async def file() -> None:
        if await _problem(store, key, record, etag):
            await store.put_file(key, path, part_bytes=part_bytes, grant=grant, resume=True, like=like)
            if like and compared(like, key, (await store.head(key)).version):
                return
            if problem := await _problem(store, key, record, etag):
                raise DigestMismatch(f"{store.url}/{key} {problem}")

    for left in reversed(range(_SENT_AGAIN + 1)):
        try:
            await retrying(file, _MANY)
            return
        except DigestMismatch as err:
            if not left:
                raise
            log.warning("sending again", file=key, error=err.message)


def _beside(call: Callable[[], str]) -> Callable[[], str]:
    """In a thread of its own, which ends by itself; what is returned waits for it."""
    worker = ThreadPoolExecutor(1, initializer=behind_the_trainer)
    found = worker.submit(call)
    worker.shutdown(wait=False)
    return found.result


async def _problem(store: Store, key: str, record: FileRecord, etag: Callable[[], str]) -> str | None:
    """By size and checksum as the store has them; read back when it names none that can be compared."""
    try:
        there = await store.head(key)
    except ObjectNotFound:
        return "is not there"
    if there.size_bytes != record.size_bytes:
        return f"has {there.size_bytes} bytes upstream, {record.size_bytes} were sent"
    by_md5 = there.md5 is not None or _IN_PARTS.fullmatch(there.version.strip('"'))
    if by_md5 and there.version.strip('"') == await to_thread.run_sync(etag):
        return None
    if there.md5 is not None:
        return "has another MD5 than what was sent"
    if await read_digest(store, there) != record.digest:
        return "reads back with another digest than what was sent"
    return None


async def read_digest(store: Store, info: ObjectInfo) -> str:
    """xxh3-128 of an object, read in ranges."""
    digest = StreamDigest()
    for start in range(0, info.size_bytes, _READ_BACK_BYTES):
        end = min(start + _READ_BACK_BYTES, info.size_bytes)
        digest.update(await store.read(info, start, end))
    return digest.xxh3
