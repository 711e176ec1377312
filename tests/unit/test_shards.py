"""Shards given up on request: all that may go, and others are served in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import numpy as np
import pytest

from forebay.stager.manifest import Manifest, freeze
from forebay.stager.shards import give_up
from forebay.tiers.store import ObjectInfo
from tests.unit.hot import Tier

MANY = 700


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def _listing() -> AsyncIterator[ObjectInfo]:
    for number in range(MANY):
        yield ObjectInfo(f"{number:04d}.tar", 10, "v")


@pytest.mark.anyio
async def test_many_are_given_up_a_few_at_a_time(tmp_path: Path):
    manifest = Manifest((await freeze(_listing(), "s3://b", tmp_path, by_key=True)).path, "s3://b")
    tier = Tier(tmp_path)
    # Every seventh was never staged.
    numbers = np.arange(MANY)
    ids = [shard.id for shard in manifest.shards(numbers[numbers % 7 != 0])]
    files = [tier.stage(object_id) for object_id in ids]
    left: list[int] = []
    ended = anyio.Event()

    async def look() -> None:
        while not ended.is_set():
            left.append(sum(object_id in tier.hot for object_id in ids))
            await anyio.lowlevel.checkpoint()

    before = await give_up(manifest, numbers, tier.hot, dry_run=True)
    assert (before.shards, before.kept) == (len(ids), 0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        await anyio.lowlevel.checkpoint()
        gone = await give_up(manifest, numbers, tier.hot, dry_run=False)
        ended.set()
    assert (gone.shards, gone.kept) == (len(ids), 0)
    assert len({count for count in left if 0 < count < len(ids)}) > 1, "nobody was served in between"
    assert not any(object_id in tier.hot for object_id in ids) and not any(file.exists() for file in files)
