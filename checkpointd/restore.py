"""Which checkpoint to restore, and its files on this node, from the nearest tier that has them (C4)."""

from __future__ import annotations

import anyio
import msgspec
import structlog
from anyio import to_thread

from forebay.checkpointd import layout
from forebay.checkpointd.commit import Found, find_commits
from forebay.checkpointd.layout import Commit, FileRecord
from forebay.checkpointd.memory import Memory
from forebay.checkpointd.partner import Download, Partner
from forebay.checkpointd.spool import Spool
from forebay.checkpointd.upload import read_digest
from forebay.core.errors import (
    CheckpointCorrupt,
    DigestMismatch,
    ForebayError,
    NoCheckpoint,
    ObjectNotFound,
    root_cause,
)
from forebay.core.protocol import Checkpoint, CheckpointFile, CheckpointOpened, OpenCheckpoint, RepairFile
from forebay.tiers.digest import digest_file
from forebay.tiers.filesystem import os_error
from forebay.tiers.store import Store

log = structlog.get_logger()

_FILES_AT_ONCE = 4


async def list_checkpoints(spool: Spool, upstream: Store, run: str) -> list[Checkpoint]:
    """Every commit on either tier, newest first, computed from the records themselves."""
    return [checkpoint for checkpoint, _ in await _survey(spool, upstream, run)]


async def _survey(spool: Spool, upstream: Store, run: str) -> list[tuple[Checkpoint, Commit | None]]:
    """With the record from a tier on which the checkpoint is good, if there is one."""
    found: dict[tuple[int, str], tuple[Checkpoint, Commit | None]] = {}
    for tier, store in _stores(spool, upstream).items():
        for at in await find_commits(store, run):
            known, commit = found.get((at.step, at.attempt), (None, None))
            if known and known.problem is None:
                # One good copy makes the checkpoint good; a bad second one is merely not listed.
                if at.problem is None:
                    seen = msgspec.structs.replace(known, tiers=[*known.tiers, tier])
                    found[at.step, at.attempt] = seen, commit
            else:
                found[at.step, at.attempt] = describe(run, at, tier), at.commit
    return sorted(found.values(), key=lambda at: (at[0].step, at[0].committed_at), reverse=True)


def _stores(spool: Spool, upstream: Store) -> dict[str, Store]:
    return {"spool": spool.store} | ({"upstream": upstream} if upstream is not spool.store else {})


class Restorer:
    """Answers for the requests that read checkpoints."""

    def __init__(self, spool: Spool, memory: Memory, partner: Partner | None, download: Download) -> None:
        self._spool = spool
        self._partner = partner
        self._memory = memory
        self._download = download

    async def open(self, request: OpenCheckpoint, upstream: Store) -> CheckpointOpened:
        """The newest checkpoint that can be had here, with the files that are needed.

        One that cannot be made whole is passed over, with the reason. Raises NoCheckpoint.
        """
        if self._partner and upstream is not self._spool.store and not request.look:
            await self._partner.rescue(upstream, request.run, self._download)
        skipped = [f"attempt {attempt}: {reason}" for attempt, reason in request.skip.items()]
        for candidate, commit in await _survey(self._spool, upstream, request.run):
            if request.step not in (None, candidate.step) or candidate.attempt in request.skip:
                continue
            if request.attempt not in (None, candidate.attempt):
                continue
            place = f"{request.run} step {candidate.step} attempt {candidate.attempt}"
            try:
                if commit is None or candidate.problem:
                    raise CheckpointCorrupt(candidate.problem or "its commit record cannot be read")
                return await self._bring(request, upstream, candidate, commit, skipped)
            except* ForebayError as errors:
                err = root_cause(errors)
                log.warning("checkpoint passed over", place=place, error=str(err))
                skipped.append(f"{place}: {err}")
        wanted = "" if request.step is None else f" at step {request.step}"
        raise NoCheckpoint(
            f"no valid checkpoint of {request.run}{wanted} in {self._spool.root} or {upstream.url}",
            hint="; ".join(skipped) or "none was ever committed there",
        )

    async def _bring(
        self,
        request: OpenCheckpoint,
        upstream: Store,
        candidate: Checkpoint,
        commit: Commit,
        skipped: list[str],
    ) -> CheckpointOpened:
        files = [file for file in commit.files if request.names is None or file.name in request.names]
        if not request.look:
            limit = anyio.CapacityLimiter(_FILES_AT_ONCE)
            async with anyio.create_task_group() as tasks:
                for file in files:
                    tasks.start_soon(self._have, upstream, commit, file, request.verify, limit)
            await to_thread.run_sync(self._spool.write_commit, commit)
        # A name that this checkpoint lacks (another world size) is the reader's to judge.
        places = [self._place(commit, file, candidate) for file in files]
        return CheckpointOpened(candidate, places, skipped, commit.about.metadata)

    def _place(self, commit: Commit, file: FileRecord, candidate: Checkpoint) -> CheckpointFile:
        tiers = ["memory"] if self._in_memory(commit, file.name) is not None else []
        if self._in_spool(commit, file):
            tiers.append("spool")
        if "upstream" in candidate.tiers:
            tiers.append("upstream")
        return CheckpointFile(file.name, file.size_bytes, file.digest, tiers)

    def _in_memory(self, commit: Commit, name: str) -> int | None:
        rank = layout.rank_of(name)
        return None if rank is None else self._memory.find(commit.run, commit.attempt, rank)

    def _in_spool(self, commit: Commit, file: FileRecord) -> bool:
        path = self._spool.path(commit.run, commit.step, commit.attempt, file.name)
        return path.is_file() and not path.is_symlink() and path.stat().st_size == file.size_bytes

    async def _have(
        self, upstream: Store, commit: Commit, file: FileRecord, verify: bool, limit: anyio.CapacityLimiter
    ) -> None:
        """In memory or in the spool; with `verify` in the spool, and right in every byte."""
        async with limit:
            if verify or not (self._in_memory(commit, file.name) is not None or self._in_spool(commit, file)):
                await self._heal(upstream, commit, file)

    async def repair(self, request: RepairFile, upstream: Store) -> None:
        """Raises CheckpointCorrupt when no tier has the file whole."""
        rank = layout.rank_of(request.name)
        if request.tier == "memory" and rank is not None:
            self._memory.forget(request.run, request.attempt, rank)
        for checkpoint, commit in await _survey(self._spool, upstream, request.run):
            if commit and (checkpoint.step, checkpoint.attempt) == (request.step, request.attempt):
                for file in commit.files:
                    if file.name == request.name:
                        await self._heal(upstream, commit, file)
                        return
        raise CheckpointCorrupt(f"{request.name} of {request.run} step {request.step}: its commit is gone")

    async def _heal(self, upstream: Store, commit: Commit, file: FileRecord) -> None:
        """The file is in the spool with the right digest afterwards."""
        key = f"{layout.folder(commit.run, commit.step, commit.attempt)}/{layout.check_file(file.name)}"
        path = self._spool.root / key
        if path.is_file() and not path.is_symlink():
            if await to_thread.run_sync(digest_file, path) == file.digest:
                return
            self._spool.quarantine(path)
        problems = []
        for store in self._sources(upstream):
            try:
                await self._download(store, await store.head(key), path, file.digest)
                return
            except ObjectNotFound:
                problems.append(f"missing in {store.url}")
            except DigestMismatch as err:
                problems.append(f"damaged in {store.url}: {err.message}")
            except ForebayError as err:
                problems.append(err.message)
            except OSError as err:
                raise os_error(err, path) from err
        raise CheckpointCorrupt(f"{file.name} is {'; '.join(problems) or 'damaged or missing'}")

    def _sources(self, upstream: Store) -> list[Store]:
        """Where a file may come from, the nearest first."""
        partner = [self._partner.store] if self._partner else []
        return partner + ([upstream] if upstream is not self._spool.store else [])


async def verify(spool: Spool, upstream: Store, run: str, step: int | None) -> list[Checkpoint]:
    """Read every byte of every copy, and say what does not fit."""
    checked = []
    for tier, store in _stores(spool, upstream).items():
        for at in await find_commits(store, run):
            if step not in (None, at.step):
                continue
            if at.commit and not at.problem and (problem := await _read_through(store, at.commit)):
                at = Found(at.step, at.attempt, at.commit, problem)
            checked.append(describe(run, at, tier))
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


def describe(run: str, at: Found, tier: str) -> Checkpoint:
    commit = at.commit
    return Checkpoint(
        run=run,
        step=at.step,
        attempt=at.attempt,
        world_size=commit.world_size if commit else 0,
        files=len(commit.files) if commit else 0,
        size_bytes=commit.size_bytes if commit else 0,
        committed_at=commit.committed_at if commit else 0.0,
        tiers=[tier],
        problem=at.problem,
        metrics=commit.about.metrics if commit else {},
    )
