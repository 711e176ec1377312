"""C3: commits when a reply is lost, a clock is wrong, a number is none, or a rank is missing."""

from __future__ import annotations

import math
from pathlib import Path

import anyio
import msgspec
import pytest

from forebay.checkpointd import commit as module
from forebay.checkpointd import layout
from forebay.checkpointd.client import _about
from forebay.checkpointd.commit import find_commits, missing_ranks, try_commit
from forebay.checkpointd.layout import Commit, FileRecord, RankManifest
from forebay.checkpointd.spool import Spool
from forebay.core.errors import CheckpointCorrupt, StoreUnreachable
from forebay.core.protocol import About, Keep
from forebay.tiers.filesystem import FilesystemStore
from forebay.tiers.store import ObjectInfo
from forebay.tiers.transfer import retrying

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def rank_arrives(store: FilesystemStore, attempt: str, rank: int = 0, world_size: int = 1) -> None:
    prefix = layout.folder("run", 10, attempt)
    name = layout.rank_file(rank)
    await store.put(f"{prefix}/{name}", b"bytes")
    record = FileRecord(name, 5, "digest")
    manifest = RankManifest("run", 10, attempt, rank, world_size, [record], About())
    await store.put(f"{prefix}/{layout.rank_manifest(rank)}", layout.encode(manifest))


class LosesReplies(FilesystemStore):
    """Does what it is told, and the first reply never arrives."""

    lost = 0

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> ObjectInfo:
        info = await super().put(key, data, if_absent=if_absent)
        if if_absent and not self.lost:
            self.lost += 1
            raise StoreUnreachable(f"no reply about {key}")
        return info


async def test_a_commit_whose_reply_was_lost_stands(tmp_path: Path):
    store = LosesReplies(tmp_path)
    await rank_arrives(store, "a")
    commit = await retrying(lambda: try_commit(store, "run", 10, "a", 1), 3)
    assert store.lost == 1 and commit is not None
    (found,) = await find_commits(store, "run")
    assert found.commit == commit and not found.problem


class WrittenAgain(FilesystemStore):
    """Each record is written again, the same, between the listing and the first look at it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.again = set[str]()

    async def read(self, info: ObjectInfo, start: int, end: int) -> memoryview:
        if info.key not in self.again:
            self.again.add(info.key)
            await self.put(info.key, (self.root / info.key).read_bytes())
        return await super().read(info, start, end)


async def test_a_record_that_is_written_again_is_looked_up_again(tmp_path: Path):
    """Ranks of a node end at the same moment: neither fails, and no reader passes the checkpoint over."""
    for rank in range(2):
        await rank_arrives(FilesystemStore(tmp_path), "a", rank, 2)
    store = WrittenAgain(tmp_path)
    commit = await try_commit(store, "run", 10, "a", 2)
    assert commit is not None and len(store.again) == 2
    assert await try_commit(store, "run", 10, "a", 2) == commit
    (found,) = await find_commits(WrittenAgain(tmp_path), "run")
    assert found.commit == commit


async def test_the_spool_writes_a_commit_once(tmp_path: Path):
    spool = Spool(tmp_path)
    await rank_arrives(FilesystemStore(spool.root), "a")
    commit = await try_commit(spool.store, "run", 10, "a", 1)
    assert commit is not None
    path = spool.root / layout.folder("run", 10, "a") / layout.COMMIT
    before = path.stat().st_ino
    spool.write_commit(commit)
    assert path.stat().st_ino == before
    path.write_bytes(b"torn")
    spool.write_commit(commit)
    assert path.read_bytes() == layout.encode(commit)


async def test_many_who_commit_at_once_end_with_one_record(tmp_path: Path):
    store, found = FilesystemStore(tmp_path), list[Commit | None]()
    for rank in range(3):
        await rank_arrives(store, "a", rank, 3)

    async def one() -> None:
        found.append(await try_commit(store, "run", 10, "a", 3))

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(one)
    assert len({msgspec.json.encode(at) for at in found}) == 1 and found[0]


async def test_a_missing_rank_is_named_and_nothing_is_committed(tmp_path: Path):
    store = FilesystemStore(tmp_path)
    await rank_arrives(store, "a", 0, 3)
    await rank_arrives(store, "a", 2, 3)
    assert await try_commit(store, "run", 10, "a", 3) is None
    assert await missing_ranks(store, "run", 10, "a", 3) == [1]
    assert await find_commits(store, "run") == []


async def test_a_manifest_of_another_attempt_is_not_taken(tmp_path: Path):
    store = FilesystemStore(tmp_path)
    await rank_arrives(store, "a")
    name = layout.rank_manifest(0)
    stray = (tmp_path / layout.folder("run", 10, "a") / name).read_bytes()
    await store.put(f"{layout.folder('run', 10, 'b')}/{name}", stray)
    with pytest.raises(CheckpointCorrupt, match="another attempt"):
        await try_commit(store, "run", 10, "b", 1)


async def test_a_clock_that_was_set_back_does_not_bring_back_what_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A job that died after step 10 saves it again: the second is the newer, whatever the clock says."""
    store, clock = FilesystemStore(tmp_path), iter([5_000_000.0, 1_000.0, 500.0])
    monkeypatch.setattr(module.time, "time", lambda: next(clock))
    for attempt in ("zz-first", "mm-second", "aa-third"):
        await rank_arrives(store, attempt)
        await try_commit(store, "run", 10, attempt, 1)
    assert [at.attempt for at in await find_commits(store, "run")] == ["aa-third", "mm-second", "zz-first"]


async def test_a_loss_that_is_no_number_loses_no_checkpoint(tmp_path: Path):
    about = _about(
        None, {"loss": math.nan, "norm": math.inf, "fine": 1.5}, Keep(best=1, metric="loss"), False
    )
    record = FileRecord(layout.rank_file(0), 5, "digest")
    commit = Commit("run", 10, "a", 1, [record], 1.0, about)
    found = layout.read_commit(layout.encode(commit), "here", "run", 10, "a")
    assert found.about.metrics == {"loss": None, "norm": None, "fine": 1.5}
