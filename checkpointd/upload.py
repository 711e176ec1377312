"""A rank's file from the spool to upstream, verified, then its manifest."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import anyio
from anyio import to_thread

from forebay.checkpointd import layout
from forebay.checkpointd.attempts import Attempt
from forebay.checkpointd.layout import FileRecord
from forebay.checkpointd.spool import behind_the_trainer
from forebay.core.config import CheckpointSettings
from forebay.core.errors import DigestMismatch, StoreUnreachable
from forebay.core.failpoint import failpoint
from forebay.tiers.digest import StreamDigest
from forebay.tiers.md5 import object_etag
from forebay.tiers.store import Grant, ObjectInfo, Store
from forebay.tiers.transfer import retrying

# Together with the jittered waits this outlasts upload_timeout_s, which is the real limit.
_MANY = 1_000_000
_READ_BACK_BYTES = 16 << 20


async def upload(
    store: Store, attempt: Attempt, folder: Path, policy: CheckpointSettings, grant: Grant
) -> None:
    """Until upstream holds the file and says so. Tried again through outages, up to upload_timeout_s.

    Raises StoreError kinds, DigestMismatch, StoreUnreachable at the time limit.
    """
    record = layout.read_manifest(folder / layout.rank_manifest(attempt.rank)).file
    prefix = layout.folder(attempt.run, attempt.step, attempt.attempt)

    path = folder / record.name
    etag = _beside(object_etag, path, policy.part_bytes) if store.url.startswith("s3:") else None

    async def file() -> None:
        info = await store.put_file(
            f"{prefix}/{record.name}", path, part_bytes=policy.part_bytes, grant=grant
        )
        await _verify(store, info, record, etag)

    async def manifest() -> None:
        name = layout.rank_manifest(attempt.rank)
        await store.put(f"{prefix}/{name}", (folder / name).read_bytes())

    with anyio.move_on_after(policy.upload_timeout_s) as limit:
        await retrying(file, _MANY)
        failpoint("upload.put")
        await retrying(manifest, _MANY)
        failpoint("upload.manifested")
    if limit.cancelled_caught:
        raise StoreUnreachable(
            f"{store.url} did not take {record.name} within {policy.upload_timeout_s:g} s",
            hint="it stays in the spool; the next start of checkpointd tries again",
        )


def _beside(call: Callable[[Path, int], str], path: Path, part_bytes: int) -> Future[str]:
    """In a thread of its own, while the bytes go up; it ends by itself."""
    worker = ThreadPoolExecutor(1, initializer=behind_the_trainer)
    found = worker.submit(call, path, part_bytes)
    worker.shutdown(wait=False)
    return found


async def _verify(store: Store, put: ObjectInfo, record: FileRecord, etag: Future[str] | None) -> None:
    """Size and checksum as the store has them; read back when it names none that can be compared."""
    there = await store.head(put.key)
    if there.size_bytes != record.size_bytes:
        raise DigestMismatch(
            f"{store.url}/{put.key} has {there.size_bytes} bytes upstream, {record.size_bytes} were sent"
        )
    if etag and there.version.strip('"') == await to_thread.run_sync(etag.result):
        return
    if there.md5 is not None:
        raise DigestMismatch(f"{store.url}/{put.key} has another MD5 than what was sent")
    if await read_digest(store, there) != record.digest:
        raise DigestMismatch(f"{store.url}/{put.key} reads back with another digest than what was sent")


async def read_digest(store: Store, info: ObjectInfo) -> str:
    """xxh3-128 of an object, read in ranges."""
    digest = StreamDigest()
    for start in range(0, info.size_bytes, _READ_BACK_BYTES):
        end = min(start + _READ_BACK_BYTES, info.size_bytes)
        digest.update(await store.read(info, start, end))
    return digest.xxh3
