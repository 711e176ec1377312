"""Pages: whatever their size, each item comes once and in order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.api.rest.pages import page_of, read_cursor, write_cursor
from forebay.core.errors import InvalidRequest, KeyReused, ProtocolError
from forebay.core.journal import Journal
from forebay.core.protocol import (
    Done,
    GetStatus,
    JobReply,
    ListJobs,
    ListShards,
    Message,
    Once,
    RetryJob,
    Selection,
    StageJob,
    encode,
)
from forebay.stager.jobbook import JobBook
from forebay.stager.manifest import Manifest, freeze
from forebay.stager.once import OnceBook
from forebay.stager.schema import MIGRATIONS
from forebay.stager.shards import shard_page
from forebay.tiers.store import ObjectInfo

MANY = 100_000


@given(st.sets(st.text(min_size=1, max_size=5), max_size=40), st.integers(1, 7))
def test_pages_of_a_collection(names: set[str], limit: int):
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = page_of(list(names), lambda name: name, cursor, limit)
        assert len(page.items) <= limit
        seen += page.items
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == sorted(names)


@given(st.text(max_size=60))
def test_a_cursor_that_was_not_made_here(text: str):
    try:
        read_cursor(text, tuple[float, str])
    except InvalidRequest as err:
        assert "begin without one" in str(err)
    made = write_cursor((1.5, text))
    assert read_cursor(made, tuple[float, str]) == (1.5, text)


async def _listing() -> AsyncIterator[ObjectInfo]:
    for number in range(MANY):
        yield ObjectInfo(f"shard-{number:06d}.tar", number, f"v{number}", None)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("manifests")
    frozen = anyio.run(lambda: freeze(_listing(), "s3://b/x", folder, by_key=True))
    return Manifest(frozen.path, "s3://b/x")


def pages(manifest: Manifest, wanted: ListShards, staged: set[str]) -> list[list[int]]:
    found = []
    while True:
        page = anyio.run(shard_page, wanted, manifest, staged)
        found.append([shard.number for shard in page.shards])
        if page.after is None:
            return found
        wanted = ListShards(wanted.dataset_id, page.after, wanted.limit, wanted.glob, wanted.staged)


@pytest.mark.parametrize("limit", [1000, 999])
def test_a_hundred_thousand_shards(manifest: Manifest, limit: int):
    found = pages(manifest, ListShards("d", limit=limit), set())
    assert [number for page in found for number in page] == list(range(MANY))
    assert max(map(len, found)) <= limit and len(found) == -(-MANY // limit)


def test_shards_of_a_rare_kind_come_all_and_no_page_takes_long(manifest: Manifest):
    staged = {manifest.shard(number).id for number in (0, 50_000, MANY - 1)}
    found = pages(manifest, ListShards("d", limit=2, staged=True), staged)
    assert [number for page in found for number in page] == [0, 50_000, MANY - 1]
    assert len(found) > 3, "a page looks at so many shards only, and may be empty"
    globbed = pages(manifest, ListShards("d", glob="*-0999*.tar"), set())
    assert [number for page in globbed for number in page] == list(range(99_900, MANY))[:100]


def a_job(number: int, state: str = "done") -> StageJob:
    return StageJob(
        f"j{number:03d}", "d", "d-1", "me", state, Selection(), "hot", 1.0, None, None, 1, 1, 1, 1, {}, 3,
        float(number // 3),
    )  # fmt: skip


def test_jobs_that_began_in_one_instant_are_not_lost_between_pages(tmp_path: Path):
    book = JobBook(Journal(tmp_path / "j.db", MIGRATIONS, durable=False))
    for number in range(600):
        book.put(a_job(number))
    everything = [job.id for job in book.newest()]
    assert len(everything) == len(set(everything)) == 600
    for cut in (1, 255, 256, 257, 599):
        last = list(book.newest())[cut - 1]
        assert [job.id for job in book.newest((last.started_at, last.id))] == everything[cut:]
    assert ListJobs().limit == 1000


@pytest.fixture
def once_book(tmp_path: Path) -> OnceBook:
    return OnceBook(Journal(tmp_path / "j.db", MIGRATIONS, durable=False))


def test_a_key_is_answered_once_and_after_a_restart_too(once_book: OnceBook, tmp_path: Path):
    done: list[Message] = []

    async def do(request: Message) -> tuple[Message, list[int]]:
        done.append(request)
        return JobReply(a_job(len(done))), []

    async def main() -> None:
        first, _ = await once_book.once(Once("k", encode(RetryJob("a"))), do)
        again, _ = await OnceBook(Journal(tmp_path / "j.db", MIGRATIONS, durable=False)).once(
            Once("k", encode(RetryJob("a"))), do
        )
        assert first == again and len(done) == 1
        with pytest.raises(KeyReused):
            await once_book.once(Once("k", encode(RetryJob("b"))), do)
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(once_book.once, Once("same", encode(RetryJob("c"))), do)
        assert len(done) == 2
        with pytest.raises(ProtocolError):
            await once_book.once(Once("x", encode(GetStatus())), do)

    anyio.run(main)


def test_a_failure_is_not_remembered(once_book: OnceBook):
    async def fails(request: Message) -> tuple[Message, list[int]]:
        raise InvalidRequest("no")

    async def works(request: Message) -> tuple[Message, list[int]]:
        return Done(), []

    async def main() -> None:
        once = Once("k", encode(RetryJob("a")))
        with pytest.raises(InvalidRequest):
            await once_book.once(once, fails)
        assert (await once_book.once(once, works))[0] == Done()

    anyio.run(main)
