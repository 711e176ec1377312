"""A second node's disk: what is `local` here goes there too, so that losing this node loses nothing.

The partner is any store that this node can write to: an export of the other node's spool disk, a path on
a file system of several nodes, or a bucket nearby. What it holds of a dead node is brought upstream, and
committed, by whoever restores with the same partner.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import structlog

from forebay.checkpointd import layout
from forebay.checkpointd.attempts import Attempt
from forebay.checkpointd.commit import find_commits, listed, read_all, try_commit
from forebay.checkpointd.layout import Commit, RankManifest
from forebay.checkpointd.retention import remove, stays
from forebay.checkpointd.spool import Spool
from forebay.checkpointd.upload import upload
from forebay.core import metrics
from forebay.core.config import CheckpointSettings
from forebay.core.errors import ForebayError
from forebay.core.protocol import Keep
from forebay.tiers.store import Grant, ObjectInfo, Store

log = structlog.get_logger()

# Store, object, where to, xxh3-128: see pipeline.Pipeline.download.
Download = Callable[[Store, ObjectInfo, Path, str], Awaitable[object]]


class Partner:
    """Nothing that goes wrong here fails a save: it is said, and counted."""

    def __init__(self, store: Store, spool: Spool, policy: CheckpointSettings) -> None:
        self.store = store
        self._spool = spool
        self._policy = policy

    async def replicate(self, attempt: Attempt, grant: Grant) -> bool:
        """The rank's files and manifest, verified; False when that did not work, or not in time."""
        try:
            with anyio.move_on_after(self._policy.partner_timeout_s) as limit:
                await upload(self.store, attempt, self._spool.folder(attempt), self._policy, grant)
        except ForebayError as err:
            self._failed(attempt.run, attempt.step, str(err))
            return False
        if limit.cancelled_caught:
            self._failed(attempt.run, attempt.step, f"not in {self._policy.partner_timeout_s:g} s")
        return not limit.cancelled_caught

    def _failed(self, run: str, step: int, error: str) -> None:
        log.warning("not on the partner", run=run, step=step, partner=self.store.url, error=error)
        metrics.checkpoint_errors.labels("partner").inc()

    async def committed(self, commit: Commit) -> None:
        """The record goes there as well, and what is older goes."""
        prefix = layout.folder(commit.run, commit.step, commit.attempt)
        try:
            await self.store.put(f"{prefix}/{layout.COMMIT}", layout.encode(commit))
            found = [at for at in await find_commits(self.store, commit.run) if at.there]
            kept = stays(found, Keep(last=self._policy.keep_local), time.time())
            for at in found:
                if (at.step, at.attempt) not in kept:
                    await remove(self.store, commit.run, at)
        except ForebayError as err:
            self._failed(commit.run, commit.step, str(err))

    async def rescue(self, upstream: Store, run: str, download: Download) -> None:
        """What a lost node left only here goes upstream, and is committed if all ranks are there then."""
        commits = await find_commits(upstream, run)
        newest = max((at.step for at in commits if not at.problem), default=-1)
        try:
            left = await self._uncommitted(run, newest)
        except ForebayError as err:
            self._failed(run, newest, str(err))
            return
        for (step, attempt), manifests in sorted(left.items()):
            prefix = layout.folder(run, step, attempt)
            there = {info.key async for info in listed(upstream, f"{prefix}/")}
            for manifest in manifests:
                key = f"{prefix}/{layout.rank_manifest(manifest.rank)}"
                if key not in there:
                    await self._bring(upstream, prefix, manifest, download)
                    await upstream.put(key, layout.encode(manifest))
                    log.info("rescued", run=run, step=step, rank=manifest.rank)
            if await try_commit(upstream, run, step, attempt, manifests[0].world_size):
                log.info("committed for a lost node", run=run, step=step)

    async def _uncommitted(self, run: str, newest: int) -> dict[tuple[int, str], list[RankManifest]]:
        """Manifests of attempts that are newer than any commit upstream."""
        found: dict[tuple[int, str], list[RankManifest]] = defaultdict(list)
        async for info in listed(self.store, f"{run}/"):
            place = layout.parse_manifest_key(info.key)
            if place and place[0] > newest:
                where = f"{self.store.url}/{info.key}"
                found[place].append(layout.decode_manifest(await read_all(self.store, info), where))
        return found

    async def _bring(self, upstream: Store, prefix: str, manifest: RankManifest, download: Download) -> None:
        for file in manifest.files:
            key = f"{prefix}/{layout.check_file(file.name)}"
            path = self._spool.root / key
            await download(self.store, await self.store.head(key), path, file.digest)
            await upstream.put_file(key, path, part_bytes=self._policy.part_bytes, resume=True)
