"""COMMIT.json: written last, once, by whoever first sees the manifests of all ranks (C3)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass

from forebay.checkpointd import layout
from forebay.checkpointd.layout import Commit, FileRecord, RankManifest
from forebay.core.errors import (
    AlreadyExists,
    BucketNotFound,
    CheckpointCorrupt,
    ObjectChanged,
    ObjectNotFound,
)
from forebay.core.protocol import About
from forebay.tiers.store import ObjectInfo, Store

_TICK_S = 0.001
_LOOKS = 5


async def read_all(store: Store, info: ObjectInfo) -> bytes:
    """Of a record that others may write again while it is looked at: then it is looked up anew.

    Raises ObjectNotFound when it went, ObjectChanged when it does not come to rest.
    """
    for _ in range(_LOOKS):
        try:
            return await _read_once(store, info)
        except ObjectChanged:
            info = await store.head(info.key)
    return await _read_once(store, info)


async def _read_once(store: Store, info: ObjectInfo) -> bytes:
    return bytes(await store.read(info, 0, info.size_bytes)) if info.size_bytes else b""


async def try_commit(store: Store, run: str, step: int, attempt: str, world_size: int) -> Commit | None:
    """The commit, if all ranks of the attempt are there (written now or before); None if some lack.

    Any number of daemons may do this at once: the put is conditional, and all write the same.
    """
    prefix = layout.folder(run, step, attempt)
    of_step = {info.key: info async for info in store.list(f"{prefix.rpartition('/')[0]}/")}
    objects = {key: info for key, info in of_step.items() if key.startswith(f"{prefix}/")}
    commit_key = f"{prefix}/{layout.COMMIT}"
    if commit_key in objects:
        return await _read(store, objects[commit_key], run, step, attempt)
    files, about = list[FileRecord](), About()
    for rank in range(world_size):
        manifest_info = objects.get(f"{prefix}/{layout.rank_manifest(rank)}")
        if manifest_info is None:
            return None
        manifest = await _manifest(store, manifest_info)
        if (manifest.attempt, manifest.rank, manifest.world_size) != (attempt, rank, world_size):
            raise CheckpointCorrupt(f"{store.url}/{manifest_info.key} belongs to another attempt")
        for file in manifest.files:
            there = objects.get(f"{prefix}/{file.name}")
            if there is None or there.size_bytes != file.size_bytes:
                raise CheckpointCorrupt(f"{store.url}/{prefix}/{file.name} is not what its manifest says")
        files += manifest.files
        about = about if rank else manifest.about
    committed_at = await _later_than(store, of_step.values(), run)
    commit = Commit(run, step, attempt, world_size, files, committed_at, about)
    try:
        await store.put(commit_key, layout.encode(commit), if_absent=True)
    except AlreadyExists:
        return await _read(store, await store.head(commit_key), run, step, attempt)
    return commit


async def _later_than(store: Store, objects: Iterable[ObjectInfo], run: str) -> float:
    """Now; later than other attempts of that step, although the clock was set back or is another node's."""
    now = time.time()
    for info in objects:
        place = layout.parse_commit_key(info.key)
        with suppress(CheckpointCorrupt, ObjectNotFound, ObjectChanged):
            if place:
                now = max(now, (await _read(store, info, run, *place)).committed_at + _TICK_S)
    return now


async def missing_ranks(store: Store, run: str, step: int, attempt: str, world_size: int) -> list[int]:
    prefix = layout.folder(run, step, attempt)
    there = {info.key async for info in store.list(f"{prefix}/")}
    return [r for r in range(world_size) if f"{prefix}/{layout.rank_manifest(r)}" not in there]


@dataclass(frozen=True)
class Found:
    """A COMMIT.json. `there`: names and sizes of the files beside it that are as it says.

    With a `problem` the checkpoint is not whole here, and no reader should take it from here alone.
    """

    step: int
    attempt: str
    commit: Commit | None
    problem: str | None
    there: frozenset[str] = frozenset()
    pinned: bool = False


async def listed(store: Store, prefix: str) -> AsyncIterator[ObjectInfo]:
    """Nothing, where there is nothing yet."""
    try:
        async for info in store.list(prefix):
            yield info
    except (ObjectNotFound, BucketNotFound):
        return


async def find_commits(store: Store, run: str) -> list[Found]:
    """Every commit of a run, newest step first."""
    found: list[Found] = []
    objects = {info.key: info async for info in listed(store, f"{layout.check_run(run)}/")}
    for key, info in objects.items():
        place = layout.parse_commit_key(key)
        if place is None:
            continue
        step, attempt = place
        try:
            commit = await _read(store, info, run, step, attempt)
        except (ObjectNotFound, ObjectChanged):
            # Retention took it between the listing and the look.
            continue
        except CheckpointCorrupt as err:
            found.append(Found(step, attempt, None, err.message))
            continue
        prefix = layout.folder(run, step, attempt)
        there = {
            file.name
            for file in commit.files
            if (at := objects.get(f"{prefix}/{file.name}")) is not None and at.size_bytes == file.size_bytes
        }
        missing = [file.name for file in commit.files if file.name not in there]
        problem = f"{', '.join(missing[:3])}: missing or of another size" if missing else None
        pinned = f"{prefix}/{layout.PIN}" in objects
        found.append(Found(step, attempt, commit, problem, frozenset(there), pinned))
    return sorted(found, key=lambda at: (at.step, at.commit.committed_at if at.commit else 0.0), reverse=True)


async def _read(store: Store, info: ObjectInfo, run: str, step: int, attempt: str) -> Commit:
    return layout.read_commit(await read_all(store, info), f"{store.url}/{info.key}", run, step, attempt)


async def _manifest(store: Store, info: ObjectInfo) -> RankManifest:
    return layout.decode_manifest(await read_all(store, info), f"{store.url}/{info.key}")
