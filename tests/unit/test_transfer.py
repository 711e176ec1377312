"""Transfers: nothing is visible before it is whole and right (S3, S8, F7, F23, F25, F27)."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.config import TransferSettings
from forebay.core.errors import (
    DigestMismatch,
    ForebayError,
    InvalidRequest,
    ObjectChanged,
    ShortBody,
    StoreUnreachable,
)
from forebay.tiers import md5, transfer
from forebay.tiers.budget import Class, Gate, Ticket
from forebay.tiers.digest import PrefixDigest, digest_bytes, digest_uncached
from forebay.tiers.filesystem import FilesystemStore
from forebay.tiers.flow import Flow
from forebay.tiers.landing import PARTIAL, Fetched, FileLanding, MemoryLanding
from forebay.tiers.store import ObjectInfo, check_key, md5_of_etag
from forebay.tiers.transfer import Transfers


class FaultyStore(FilesystemStore):
    """A real store whose reads go wrong as told: one fault per read, then well."""

    def __init__(self, root: Path, faults: list[object]) -> None:
        super().__init__(root)
        self.faults = faults
        self.reads = 0

    async def read(self, info: ObjectInfo, start: int, end: int) -> memoryview:
        self.reads += 1
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, ForebayError):
            raise fault
        body = await super().read(info, start, end)
        if fault == "flip":
            flipped = bytearray(body)
            flipped[len(flipped) // 2] ^= 1
            return memoryview(flipped)
        return body


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(transfer, "_LONGEST_WAIT_S", 0.002)


def settings_of(**kwargs: int) -> TransferSettings:
    return TransferSettings(**{"range_bytes": 1000, "whole_bytes": 2000, "inflight_bytes": 5000, **kwargs})


def bring(
    store: FaultyStore, data: bytes, folder: Path, *, md5: bool = True, attempts: int = 4, most: int = 8
) -> Fetched:
    async def main() -> Fetched:
        info = await store.put("a/b", data)
        known = ObjectInfo(
            info.key, info.size_bytes, info.version, hashlib.md5(data).hexdigest() if md5 else None
        )
        transfers = Transfers(settings_of(attempts=attempts), Gate(5000))
        landing = partial(FileLanding, folder / "hot/x")
        return await transfers.fetch(store, Flow("s", most), known, landing, Ticket(Class.DEMAND))

    return anyio.run(main)


@pytest.mark.parametrize("size", [0, 1, 1999, 2000, 2001, 3000, 12_345])
def test_bytes_and_digests_fit_for_whole_and_ranged(size: int, tmp_path: Path):
    data = os.urandom(size)
    found = bring(FaultyStore(tmp_path / "s", []), data, tmp_path)
    assert found.path and found.path.read_bytes() == data and found.digest == digest_bytes(data)
    assert found.blocks_bytes >= size
    assert os.listdir(tmp_path / "hot") == ["x"]


@pytest.mark.parametrize("size", [1500, 9000])
@pytest.mark.parametrize("fault", [ShortBody("short"), StoreUnreachable("gone"), "flip"])
def test_a_passing_fault_is_tried_again(size: int, fault: object, tmp_path: Path):
    data = os.urandom(size)
    assert bring(FaultyStore(tmp_path / "s", [fault]), data, tmp_path).digest == digest_bytes(data)
    assert (tmp_path / "hot/x").read_bytes() == data


@pytest.mark.parametrize("size", [1500, 9000])
@pytest.mark.parametrize(
    ("fault", "raised"),
    [(ShortBody("short"), ShortBody), (ObjectChanged("new"), ObjectChanged), ("flip", DigestMismatch)],
)
def test_a_lasting_fault_is_an_error_and_leaves_nothing(
    size: int, fault: object, raised: type, tmp_path: Path
):
    """F23: bad bytes are never at a path that a client can open."""
    store = FaultyStore(tmp_path / "s", [fault] * 500)
    with pytest.raises(raised):
        bring(store, os.urandom(size), tmp_path)
    # Ranges that are right may stay for a later try, under a name that nobody opens.
    assert [p for p in tmp_path.glob("hot/*") if not p.name.startswith(PARTIAL)] == []
    if size == 1500 or raised is not ShortBody:
        assert list(tmp_path.glob("hot/*")) == []


def test_the_error_names_expected_and_found(tmp_path: Path):
    data = os.urandom(100)
    with pytest.raises(DigestMismatch, match=hashlib.md5(data).hexdigest()):
        bring(FaultyStore(tmp_path / "s", ["flip"] * 9), data, tmp_path)


def test_a_changed_object_is_not_tried_again(tmp_path: Path):
    """F27: a new version restarts at the listing, it is never spliced."""
    store = FaultyStore(tmp_path / "s", [ObjectChanged("new")])
    with pytest.raises(ObjectChanged):
        bring(store, os.urandom(100), tmp_path)
    assert store.reads == 1


def test_a_file_replaced_since_its_listing_is_noticed(tmp_path: Path):
    async def main() -> None:
        store = FilesystemStore(tmp_path / "s")
        info = await store.put("k", b"old!")
        await store.put("k", b"new!")
        with pytest.raises(ObjectChanged):
            await store.read(info, 0, 4)

    anyio.run(main)


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        bring(FaultyStore(tmp_path / "s", []), os.urandom(9000), tmp_path)
    assert list(tmp_path.glob("hot/*")) == []


@pytest.mark.parametrize("fault_at", [0, 3, 8])
def test_an_interrupted_object_goes_on_where_it_was(fault_at: int, tmp_path: Path):
    """Only the ranges that were missing are asked for again; another version begins anew."""
    data = os.urandom(9500)
    store = FaultyStore(tmp_path / "s", [None] * fault_at + [StoreUnreachable("gone")] * 50)
    with pytest.raises(StoreUnreachable):
        bring(store, data, tmp_path, attempts=1, most=1)
    kept = len((tmp_path / "hot" / f"{PARTIAL}x.ranges").read_text().splitlines()) - 1
    assert kept == fault_at
    store.faults, store.reads = [], 0

    async def go_on() -> Fetched:
        info = await store.head("a/b")
        transfers = Transfers(settings_of(), Gate(5000))
        landing = partial(FileLanding, tmp_path / "hot/x")
        return await transfers.fetch(store, Flow("s", 8), info, landing, Ticket(Class.BULK))

    found = anyio.run(go_on)
    assert store.reads == 10 - kept
    assert found.digest == digest_bytes(data) and os.listdir(tmp_path / "hot") == ["x"]


def test_a_partial_file_of_another_version_or_boot_does_not_count(tmp_path: Path):
    info = ObjectInfo("k", 5000, "v1")

    def begun(info: ObjectInfo) -> list[int]:
        landing = FileLanding(tmp_path / "x")
        done = landing.begin(info, 1000)
        landing.arrived(2)
        landing.close(keep=True)
        return done

    assert begun(info) == []
    assert begun(info) == [2]
    assert begun(ObjectInfo("k", 5000, "v2")) == []
    record = tmp_path / f"{PARTIAL}x.ranges"
    record.write_bytes(record.read_bytes().replace(b'"boot_id":"', b'"boot_id":"other'))
    assert begun(ObjectInfo("k", 5000, "v2")) == []
    record.write_bytes(record.read_bytes() + b"9999\n-1\n3")
    assert begun(ObjectInfo("k", 5000, "v2")) == [2]
    record.write_bytes(b"nonsense")
    assert begun(ObjectInfo("k", 5000, "v2")) == []


def test_memory_takes_what_no_disk_can_and_is_sealed(tmp_path: Path):
    data = os.urandom(4000)

    async def main() -> Fetched:
        store = FaultyStore(tmp_path / "s", [])
        info = await store.put("k", data)
        transfers = Transfers(settings_of(), Gate(5000))
        return await transfers.fetch(store, Flow("s", 8), info, MemoryLanding, Ticket(Class.DEMAND))

    found = anyio.run(main)
    assert found.fd is not None and os.pread(found.fd, 5000, 0) == data
    with pytest.raises(PermissionError):
        os.ftruncate(found.fd, 10)
    os.close(found.fd)


@pytest.mark.parametrize("key", ["../x", "a/../b", "/abs", "", "a\0b", "./a"])
def test_names_that_could_leave_the_store_are_refused(key: str):
    with pytest.raises(InvalidRequest):
        check_key(key)


def test_a_multipart_etag_is_no_md5():
    assert md5_of_etag('"5d41402abc4b2a76b9719d911017c592"') == "5d41402abc4b2a76b9719d911017c592"
    assert md5_of_etag('"7c2227282e63eac27ac533a2c054698f-3"') is None
    assert md5_of_etag(None) is None


def test_puts_are_atomic_and_conditional(tmp_path: Path):
    from forebay.core.errors import AlreadyExists

    async def main() -> None:
        store = FilesystemStore(tmp_path)
        await store.put("d/a", b"1", if_absent=True)
        with pytest.raises(AlreadyExists):
            await store.put("d/a", b"2", if_absent=True)
        assert (tmp_path / "d/a").read_bytes() == b"1"
        assert os.listdir(tmp_path / "d") == ["a"]

    anyio.run(main)


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=400) | st.integers(0, 300_000).map(bytes), min_size=1, max_size=16))
def test_md5_of_many_is_md5_of_each(bodies):
    """The SIMD code against hashlib: any number of lanes, any lengths."""
    lanes = pytest.importorskip("forebay.tiers._native")
    assert lanes.md5_many(bodies) == [hashlib.md5(body).digest() for body in bodies]


def test_md5_lanes_refuse_what_is_no_batch():
    lanes = pytest.importorskip("forebay.tiers._native")
    for wrong in ([], [b""] * 17):
        with pytest.raises(ValueError, match="1 to 16 buffers"):
            lanes.md5_many(wrong)
    with pytest.raises(TypeError):
        lanes.md5_many(["text"])


@pytest.mark.parametrize("size", [10, md5.LARGE_BYTES + 7])
@pytest.mark.parametrize("count", [1, 3, 25])
def test_every_reader_gets_its_own_md5_whoever_fails_or_is_cancelled(size: int, count: int):
    bodies = [os.urandom(size + number) for number in range(count)]
    found: dict[int, str] = {}

    async def read(number: int) -> memoryview:
        await anyio.sleep(0.001 * (number % 3))
        if number % 5 == 4:
            raise ShortBody("short")
        return memoryview(bodies[number])

    async def one(lanes: md5.Md5Lanes, number: int) -> None:
        try:
            with anyio.move_on_after(0 if number % 7 == 6 else 30):
                body, digest = await lanes.of(lambda: read(number))
                assert bytes(body) == bodies[number]
                found[number] = digest
        except ShortBody:
            found[number] = "short"

    async def main() -> None:
        lanes = md5.Md5Lanes()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for number in range(count):
                    tasks.start_soon(one, lanes, number)

    anyio.run(main)
    for number in range(count):
        if number % 7 != 6:
            assert found[number] == ("short" if number % 5 == 4 else hashlib.md5(bodies[number]).hexdigest())


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, (3 << 20) + 4097])
def test_what_goes_past_the_page_cache_lands_whole(tmp_path: Path, size: int):
    """O_DIRECT wants aligned memory, offsets and lengths; a body gives none of the three."""
    body = os.urandom(size + 3)[3:]
    landing = FileLanding(tmp_path / "hot/x", direct=True)
    landing.begin(ObjectInfo("x", size, "v1"), 1 << 20)
    for start in reversed(range(0, size, 1 << 20)):
        landing.write(memoryview(body)[start : start + (1 << 20)], start)
    fetched = landing.publish(digest_bytes(body))
    landing.close(keep=False)
    assert fetched.path is not None and fetched.path.read_bytes() == body


@settings(max_examples=50)
@given(st.permutations(range(9)), st.sets(st.integers(0, 8)))
def test_a_digest_is_of_the_order_in_the_file_whatever_the_order_of_arrival(order: list[int], kept: set[int]):
    """`kept`: whose bytes are still in memory; the others are read back."""
    body = os.urandom(9 * 1000 - 300)
    seen: list[bytes] = []

    async def also(piece: memoryview) -> None:
        seen.append(bytes(piece))

    async def main() -> str:
        with tempfile.TemporaryFile() as file:
            file.write(body)
            file.flush()
            digest = PrefixDigest(file.fileno(), also)
            with anyio.fail_after(20):
                async with anyio.create_task_group() as tasks:
                    for number in order:
                        start, end = number * 1000, min(number * 1000 + 1000, len(body))
                        view = memoryview(body)[start:end] if number in kept else None
                        tasks.start_soon(digest.written, start, end, view)
                        await anyio.lowlevel.checkpoint()
            return digest.hexdigest()

    assert anyio.run(main) == digest_bytes(body)
    assert b"".join(seen) == body


@pytest.mark.parametrize("size", [0, 1, 4096, (5 << 20) + 17])
def test_reading_past_the_page_cache_digests_the_same(tmp_path: Path, size: int):
    path = tmp_path / "x"
    path.write_bytes(os.urandom(size))
    assert digest_uncached(path) == digest_bytes(path.read_bytes())
