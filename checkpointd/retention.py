"""What leaves a tier, after a commit and never before: by rule, and only what is provably ours (C5).

Upstream it is the work of whoever commits rank 0's part, so that nodes do not do it in each other's way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Set

import structlog
from anyio import to_thread

from forebay.checkpointd import layout
from forebay.checkpointd.attempts import Attempts
from forebay.checkpointd.commit import Found, find_commits
from forebay.checkpointd.spool import Spool
from forebay.core.errors import NoCheckpoint, WrongState
from forebay.core.protocol import Keep
from forebay.tiers.store import Store

log = structlog.get_logger()


def stays(found: Iterable[Found], keep: Keep, now: float) -> set[tuple[int, str]]:
    """(step, attempt) of those that stay: by a rule, by a pin, and the newest in any case.

    `found`, newest first, is what counts as good. Without any rule everything stays.
    """
    good = [at for at in found if at.commit]
    kept = {(at.step, at.attempt) for at in good if at is good[0] or at.pinned}
    if _keeps_all(keep):
        return {(at.step, at.attempt) for at in good}
    kept |= {(at.step, at.attempt) for at in good[: keep.last or 0]}
    for at in good:
        assert at.commit
        young = keep.age_s is not None and now - at.commit.committed_at < keep.age_s
        if young or (keep.every and at.step % keep.every == 0):
            kept.add((at.step, at.attempt))
    return kept | {(at.step, at.attempt) for at in _best(good, keep)}


def _keeps_all(keep: Keep) -> bool:
    return (keep.last, keep.every, keep.best, keep.age_s) == (None, None, None, None)


def _best(good: list[Found], keep: Keep) -> list[Found]:
    measured = [(at.commit.about.metrics.get(keep.metric), at) for at in good if at.commit]
    # What was not measured, or is no number, is nobody's best.
    sound = [(value, at) for value, at in measured if value is not None and not math.isnan(value)]
    ordered = sorted(sound, key=lambda item: item[0], reverse=keep.mode == "max")
    return [at for _, at in ordered[: keep.best or 0]]


async def trim_spool(
    spool: Spool, attempts: Attempts, run: str, keep: int, read: Set[tuple[int, str]]
) -> None:
    """Keep the newest `keep` commits of which this node's files are whole, all open attempts, and what
    is being read.

    What is older goes: further commits, and attempts that never completed.
    """
    commits = await find_commits(spool.store, run)
    good = [at for at in commits if spool.has_own(run, at)]
    if not good:
        return
    oldest_kept = good[:keep][-1].step
    of_run = attempts.of_run(run)
    kept = stays(good, Keep(last=keep), time.time()) | {(a.step, a.attempt) for a in of_run if a.open}
    known = {(at.step, at.attempt) for at in commits} | {(a.step, a.attempt) for a in of_run}
    for step, attempt in known - kept - read:
        # To remove gigabytes takes a disk its time.
        if step <= oldest_kept and await to_thread.run_sync(spool.remove, run, step, attempt):
            log.info("left the spool", run=run, step=step, attempt=attempt)


async def leaving(store: Store, run: str, keep: Keep, read: Set[tuple[int, str]]) -> list[Found]:
    """What a rule would take from a tier, but for what is being read: nothing, when no checkpoint is good."""
    if _keeps_all(keep):
        # Not a look at every commit of the run after each one.
        return []
    commits = await find_commits(store, run)
    kept = stays([at for at in commits if not at.problem], keep, time.time())
    return [at for at in commits if kept and not at.pinned and (at.step, at.attempt) not in kept | read]


async def removable(store: Store, run: str, step: int, read: Set[tuple[int, str]]) -> list[Found]:
    """All attempts of a step, if each of them may go.

    Raises NoCheckpoint, or WrongState for the newest whole one (C5), a pinned one, one being read.
    """
    commits = await find_commits(store, run)
    found = [at for at in commits if at.step == step]
    if not found:
        raise NoCheckpoint(f"there is no checkpoint of {run} at step {step} in {store.url}")
    newest = next((at for at in commits if not at.problem), None)
    for at in found:
        if at is newest:
            raise WrongState(f"step {step} is the newest checkpoint of {run}, which always stays")
        if at.pinned:
            raise WrongState(f"step {step} of {run} is pinned", hint="unpin it first")
        if (at.step, at.attempt) in read:
            raise WrongState(f"step {step} of {run} is being read", hint="try again later")
    return found


async def trim(store: Store, run: str, keep: Keep, read: Set[tuple[int, str]]) -> list[Found]:
    """Apply a rule to a tier; what went."""
    gone = await leaving(store, run, keep, read)
    for at in gone:
        await remove(store, run, at)
    return gone


async def remove(store: Store, run: str, at: Found) -> None:
    """COMMIT goes first: a half-removed checkpoint must not look like one."""
    prefix = layout.folder(run, at.step, at.attempt)
    listed = {f"{prefix}/{file.name}" for file in at.commit.files} if at.commit else set()
    await store.delete(f"{prefix}/{layout.COMMIT}")
    async for info in store.list(f"{prefix}/"):
        if info.key in listed or layout.is_ours(info.key.removeprefix(f"{prefix}/")):
            await store.delete(info.key)
    log.info("removed", run=run, step=at.step, attempt=at.attempt, store=store.url)
