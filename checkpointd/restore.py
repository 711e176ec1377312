"""Which checkpoint to restore, and its bytes, verified, from the nearest tier that has them (C4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog
from anyio import to_thread

from forebay.checkpointd import layout
from forebay.checkpointd.commit import find_commits
from forebay.checkpointd.layout import Commit
from forebay.checkpointd.spool import Spool
from forebay.checkpointd.upload import read_digest
from forebay.core.errors import CheckpointCorrupt, DigestMismatch, ForebayError, NoCheckpoint, ObjectNotFound
from forebay.core.protocol import Checkpoint, CheckpointOpened
from forebay.tiers.digest import digest_file
from forebay.tiers.filesystem import os_error
from forebay.tiers.store import ObjectInfo, Store

log = structlog.get_logger()

# Store, object, where to, xxh3-128: see pipeline.Pipeline.download.
Download = Callable[[Store, ObjectInfo, Path, str], Awaitable[object]]


async def list_checkpoints(spool: Spool, upstream: Store, run: str) -> list[Checkpoint]:
    """Every commit on either tier, newest first, computed from the records themselves."""
    found: dict[tuple[int, str], Checkpoint] = {}
    tiers = {"spool": spool.store, "upstream": upstream}
    if upstream is spool.store:
        del tiers["upstream"]
    for tier, store in tiers.items():
        for commit, problem, step, attempt in await find_commits(store, run):
            known = found.get((step, attempt))
            seen = _describe(run, step, attempt, commit, problem, tier)
            if known and known.problem is None:
                # One good copy makes the checkpoint good; a bad second one is merely not listed.
                if problem is None:
                    found[step, attempt] = msgspec.structs.replace(known, tiers=[*known.tiers, tier])
            else:
                found[step, attempt] = seen
    return sorted(found.values(), key=lambda c: (c.step, c.committed_at), reverse=True)


async def open_checkpoint(
    spool: Spool,
    upstream: Store,
    run: str,
    download: Download,
    step: int | None,
    attempt: str | None,
) -> CheckpointOpened:
    """The newest checkpoint (or the one asked for) of which every file is in the spool, verified.

    A damaged local file is put aside and fetched from upstream; a checkpoint that cannot be made
    whole is passed over, with the reason. Raises NoCheckpoint.
    """
    skipped: list[str] = []
    for candidate in await list_checkpoints(spool, upstream, run):
        if step not in (None, candidate.step) or attempt not in (None, candidate.attempt):
            continue
        place = f"{run} step {candidate.step} attempt {candidate.attempt}"
        try:
            commit = await _commit_of(spool, upstream, candidate)
            for file in commit.files:
                await _bring(spool, upstream, commit, file, download)
            await to_thread.run_sync(spool.write_commit, commit)
        except ForebayError as err:
            log.warning("checkpoint passed over", place=place, error=str(err))
            skipped.append(f"{place}: {err.message}")
            continue
        return CheckpointOpened(candidate, [file.name for file in commit.files], skipped)
    wanted = "" if step is None else f" at step {step}"
    raise NoCheckpoint(
        f"no valid checkpoint of {run}{wanted} in {spool.root} or {upstream.url}",
        hint="; ".join(skipped) or "none was ever committed there",
    )


async def verify(spool: Spool, upstream: Store, run: str, step: int | None) -> list[Checkpoint]:
    """Read every byte of every copy, and say what does not fit."""
    checked = []
    stores = {"spool": spool.store} | ({"upstream": upstream} if upstream is not spool.store else {})
    for tier, store in stores.items():
        for commit, problem, at, attempt in await find_commits(store, run):
            if step not in (None, at):
                continue
            if commit and not problem:
                problem = await _read_through(store, commit)
            checked.append(_describe(run, at, attempt, commit, problem, tier))
    return sorted(checked, key=lambda c: (c.step, c.committed_at), reverse=True)


async def _read_through(store: Store, commit: Commit) -> str | None:
    for file in commit.files:
        key = f"{layout.folder(commit.run, commit.step, commit.attempt)}/{file.name}"
        try:
            if await read_digest(store, await store.head(key)) != file.digest:
                return f"{file.name} does not match its digest"
        except ForebayError as err:
            return f"{file.name} cannot be read: {err.message}"
    return None


async def _commit_of(spool: Spool, upstream: Store, candidate: Checkpoint) -> Commit:
    for store in (spool.store, upstream):
        for commit, problem, step, attempt in await find_commits(store, candidate.run):
            if commit and not problem and (step, attempt) == (candidate.step, candidate.attempt):
                return commit
    raise CheckpointCorrupt(candidate.problem or "its commit record cannot be read")


async def _bring(
    spool: Spool, upstream: Store, commit: Commit, file: layout.FileRecord, download: Download
) -> None:
    """The file is in the spool with the right digest afterwards."""
    key = f"{layout.folder(commit.run, commit.step, commit.attempt)}/{layout.check_file(file.name)}"
    path = spool.root / key
    if path.is_file() and not path.is_symlink():
        if await to_thread.run_sync(digest_file, path) == file.digest:
            return
        spool.quarantine(path)
    if upstream is spool.store:
        raise CheckpointCorrupt(f"{file.name} is damaged or missing, and there is no upstream")
    try:
        info = await upstream.head(key)
    except ObjectNotFound as err:
        raise CheckpointCorrupt(f"{file.name} is missing upstream") from err
    try:
        await download(upstream, info, path, file.digest)
    except DigestMismatch as err:
        raise CheckpointCorrupt(f"{file.name} is damaged upstream: {err.message}") from err
    except OSError as err:
        raise os_error(err, path) from err


def _describe(
    run: str, step: int, attempt: str, commit: Commit | None, problem: str | None, tier: str
) -> Checkpoint:
    return Checkpoint(
        run=run,
        step=step,
        attempt=attempt,
        world_size=commit.world_size if commit else 0,
        files=len(commit.files) if commit else 0,
        size_bytes=commit.size_bytes if commit else 0,
        committed_at=commit.committed_at if commit else 0.0,
        tiers=[tier],
        problem=problem,
    )
