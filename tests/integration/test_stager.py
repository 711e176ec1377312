"""stagerd against a real S3 server: S1 to S5, S7 and what users of other systems suffered."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest

from forebay.benchmarks import jobs
from forebay.benchmarks.seaweed import S3Server
from forebay.core.channel import Channel, close_all
from forebay.core.errors import DaemonUnavailable, ForebayError, TierFull, WorkingSetTooLarge
from forebay.core.protocol import (
    Advance,
    ClaimIndex,
    Dataset,
    Done,
    IndexTask,
    JobReply,
    NeedShard,
    OpenPlan,
    PublishIndex,
    Register,
    ReleaseShard,
    ShardReady,
    Stage,
    StageJob,
)
from tests.conftest import Node, eventually, shard_bytes

MakeDataset = Callable[[list[int], int], str]
KB = 1000


def register(channel: Channel, url: str, format: str = "webdataset") -> Dataset:
    return jobs.register(channel, Register(url, format))


def read_shard(channel: Channel, dataset: Dataset, shard: int) -> bytes:
    reply, fds = channel.request(NeedShard(dataset.id, shard), expect=ShardReady, timeout_s=60)
    try:
        return os.pread(fds[0], reply.size_bytes + 1, 0)
    finally:
        close_all(fds)


def stage(channel: Channel, dataset: Dataset) -> StageJob:
    return jobs.run_job(channel, Stage(dataset.id))


def test_bytes_are_the_objects_bytes(node: Node, make_dataset: MakeDataset, s3: S3Server):
    """S1, for small objects (one GET) and large ones (ranges)."""
    node.set(FOREBAY_TRANSFER__WHOLE_BYTES="50KB", FOREBAY_TRANSFER__RANGE_BYTES="40KB")
    url = make_dataset([3, 90, 2], 2 * KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        for shard, samples in enumerate([3, 90, 2]):
            assert read_shard(channel, dataset, shard) == shard_bytes(shard, samples, 2 * KB)


def test_a_replaced_object_is_another_file_never_a_mixture(
    node: Node, make_dataset: MakeDataset, s3: S3Server, prefix: str
):
    """S1 and F8: same key, same size; the old listing fails clearly, a new one serves new bytes."""
    url = make_dataset([4], KB)
    new = shard_bytes(7, 4, KB)
    node.start()
    with node.connect() as channel:
        old = register(channel, url)
        obstore.put(s3.store(), f"{prefix}/shard-000.tar", new, use_multipart=False)
        with pytest.raises(ForebayError, match="replaced") as caught:
            read_shard(channel, old, 0)
        assert caught.value.code == "object_changed" and "register" in caught.value.hint
        fresh = register(channel, url)
        assert fresh.fingerprint != old.fingerprint
        assert read_shard(channel, fresh, 0) == new


def test_a_staged_version_outlives_its_object(
    node: Node, make_dataset: MakeDataset, s3: S3Server, prefix: str
):
    """F8: a running epoch keeps the version of its plan."""
    url = make_dataset([4], KB)
    node.start()
    with node.connect() as channel:
        old = register(channel, url)
        before = read_shard(channel, old, 0)
        obstore.put(s3.store(), f"{prefix}/shard-000.tar", shard_bytes(9, 4, KB), use_multipart=False)
        assert read_shard(channel, old, 0) == before


def test_foreign_files_and_links_are_left_alone(node: Node, make_dataset: MakeDataset):
    """S2: in the hot directory, under names like ours, and behind links."""
    url = make_dataset([5] * 6, 10 * KB)
    precious = node.home / "precious"
    precious.mkdir()
    (precious / ("a" * 32)).write_text("only copy")
    (precious / ".forebay-tmp-dead-beef").write_text("not yours")
    node.objects.mkdir(parents=True)
    (node.objects / "ab").symlink_to(precious)
    (node.settings.hot_dirs[0] / "dataset.bin").write_text("a user's")
    (node.objects / "cd").mkdir()
    (node.objects / "cd" / "notes.txt").write_text("a user's too")
    (node.objects / "cd" / ("c" * 32)).symlink_to(precious / ("a" * 32))
    orphan = node.objects / "cd" / ("d" * 32)
    orphan.write_text("left by a dead daemon")
    node.set(FOREBAY_STAGER__CAPACITY="150KB")
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        for shard in range(6):
            read_shard(channel, dataset, shard)
            channel.request(ReleaseShard(dataset.id, shard), expect=Done)
    assert eventually(lambda: not orphan.exists())
    assert sorted(p.name for p in precious.iterdir()) == [".forebay-tmp-dead-beef", "a" * 32]
    assert (node.settings.hot_dirs[0] / "dataset.bin").exists()
    assert (node.objects / "cd" / "notes.txt").exists()
    assert (node.objects / "cd" / ("c" * 32)).is_symlink()


def test_a_link_under_a_shards_name_is_not_followed(node: Node, make_dataset: MakeDataset):
    """S2: whoever can write there cannot make stagerd hand out another file."""
    url = make_dataset([3], KB)
    secret = node.home / "secret"
    secret.write_text("x" * 100)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        good = read_shard(channel, dataset, 0)
        (staged,) = [p for p in node.objects.rglob("*") if p.is_file()]
        staged.unlink()
        staged.symlink_to(secret)
        assert read_shard(channel, dataset, 0) == good
        assert secret.read_text() == "x" * 100


def test_kill_9_in_the_middle_of_a_fetch_leaves_nothing_visible(node: Node, make_dataset: MakeDataset):
    """S3, F3 and F7: killed while fetching, started again at once, complete afterwards."""
    url = make_dataset([40] * 12, 50 * KB)
    for round_number in range(4):
        node.start()
        with node.connect() as channel:
            dataset = register(channel, url)
            channel.request(Stage(dataset.id), expect=JobReply)
            eventually(lambda n=round_number: node.stager().shards >= 2 * n)
            node.kill()
        for path in node.objects.rglob("*"):
            if path.is_file() and not path.name.startswith("."):
                assert path.stat().st_size == dataset.largest_bytes
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        assert stage(channel, dataset).state == "done"
        for shard in range(12):
            assert read_shard(channel, dataset, shard) == shard_bytes(shard, 40, 50 * KB)
    assert eventually(lambda: not list(node.objects.rglob(".forebay-tmp-*")))


def test_a_running_job_goes_on_after_a_crash(node: Node, make_dataset: MakeDataset):
    url = make_dataset([40] * 12, 50 * KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        job = channel.request(Stage(dataset.id), expect=JobReply)[0].job
    node.kill()
    node.start()
    with node.connect() as channel:
        job = jobs.follow(channel, job)
        assert (job.state, job.shards_done, job.bytes_done) == ("done", 12, dataset.size_bytes)


def test_a_file_of_another_boot_is_verified_on_first_use(node: Node, make_dataset: MakeDataset):
    """S3: after a power cut a file may hold zeros under its final name; it is fetched again."""
    import sqlite3

    url = make_dataset([20, 20], 10 * KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        good = [read_shard(channel, dataset, shard) for shard in range(2)]
    node.kill()
    with sqlite3.connect(node.settings.home / "stager/catalog.db") as db:
        db.execute("UPDATE objects SET boot_id='another boot'")
    damaged = next(p for p in sorted(node.objects.rglob("*")) if p.is_file())
    damaged.write_bytes(bytes(damaged.stat().st_size))
    node.start()
    with node.connect() as channel:
        assert [read_shard(channel, dataset, shard) for shard in range(2)] == good
    assert node.stager().fetches == 1


@pytest.fixture
def small_disk(node: Node):
    """A file system of its own as hot directory: what it has taken can be read at one instant."""
    folder = node.home / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True)
    node.set(FOREBAY_STAGER__HOT_DIR=str(folder))
    yield folder
    node.close()
    subprocess.run(["umount", str(folder)], check=True)


def test_capacity_holds_in_allocated_blocks(node: Node, small_disk: Path, make_dataset: MakeDataset):
    """S4: however many want however much at once."""
    url = make_dataset([1] * 40, 11 * KB)
    capacity = 200 * KB
    node.set(FOREBAY_STAGER__CAPACITY=str(capacity))
    node.start()
    over = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            disk = os.statvfs(small_disk)
            over.append((disk.f_blocks - disk.f_bfree) * disk.f_frsize)

    watcher = threading.Thread(target=watch)
    watcher.start()

    def load(first: int) -> None:
        with node.connect() as channel:
            dataset = register(channel, url)
            order = [(first + i) % 40 for i in range(40)]
            channel.request(OpenPlan(dataset.id, order, 2), expect=Done)
            for place, shard in enumerate(order):
                channel.request(Advance(place), expect=Done)
                assert read_shard(channel, dataset, shard) == shard_bytes(shard, 1, 11 * KB)
                channel.request(ReleaseShard(dataset.id, shard), expect=Done)

    loaders = [threading.Thread(target=load, args=(first,)) for first in (0, 10, 20, 30)]
    for thread in loaders:
        thread.start()
    for thread in loaders:
        thread.join()
    done.set()
    watcher.join()
    assert max(over) <= capacity
    status = node.stager()
    assert status.held_bytes <= capacity and status.evictions > 0 and status.leased_bytes == 0


def test_a_shard_larger_than_the_tier_is_an_error_at_once(node: Node, make_dataset: MakeDataset):
    """F1: names shard, size, capacity and the setting."""
    url = make_dataset([50], 10 * KB)
    node.set(FOREBAY_STAGER__CAPACITY="100KB")
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        began_at = time.monotonic()
        with pytest.raises(ForebayError, match=r"shard-000\.tar takes .* holds 97.7KiB .*stager.capacity"):
            read_shard(channel, dataset, 0)
        with pytest.raises(WorkingSetTooLarge, match="hot tier holds"):
            channel.request(Stage(dataset.id), expect=JobReply)
        assert time.monotonic() - began_at < 5


def test_a_working_set_that_cannot_fit_is_an_error_at_once(node: Node, make_dataset: MakeDataset):
    """F2: how much is needed, how much there is."""
    url = make_dataset([3] * 10, 10 * KB)
    node.set(FOREBAY_STAGER__CAPACITY="130KB")
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        with pytest.raises(WorkingSetTooLarge, match=r"hold up to .*KiB open at once .*shuffle_block"):
            channel.request(OpenPlan(dataset.id, list(range(10)), 6), expect=Done)
        channel.request(OpenPlan(dataset.id, list(range(10)), 2), expect=Done)


def test_a_tier_held_open_by_others_ends_in_an_error_that_says_so(node: Node, make_dataset: MakeDataset):
    """S6: a wait has an end, and names who holds what."""
    url = make_dataset([3] * 4, 10 * KB)
    node.set(FOREBAY_STAGER__CAPACITY="130KB", FOREBAY_STAGER__WAIT_S="1")
    node.start()
    with node.connect() as holder, node.connect() as channel:
        dataset = register(channel, url)
        for shard in range(3):
            read_shard(holder, dataset, shard)
        with pytest.raises(TierFull, match=r"shard-003.*in use .* in 3 shards"):
            read_shard(channel, dataset, 3)


def test_a_full_disk_is_an_error_that_names_it(node: Node, make_dataset: MakeDataset):
    """F25: a real small file system, filled by strangers: memory serves, and without it an error."""
    url = make_dataset([3], 100 * KB)
    hot = node.home / "small"
    hot.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(hot)], check=True)
    try:
        (hot / "strangers").write_bytes(bytes(200 * KB))
        node.set(FOREBAY_STAGER__HOT_DIR=str(hot), FOREBAY_STAGER__CAPACITY="10MB")
        node.start()
        with node.connect() as channel:
            dataset = register(channel, url)
            assert read_shard(channel, dataset, 0) == shard_bytes(0, 3, 100 * KB)
            assert node.stager().overflow_bytes == dataset.size_bytes
        assert eventually(lambda: node.stager().overflow_bytes == 0)
        node.kill()
        node.set(FOREBAY_STAGER__OVERFLOW="0")
        node.start()
        with node.connect() as channel:
            with pytest.raises(ForebayError, match=r"no room|no space") as caught:
                read_shard(channel, dataset, 0)
            assert caught.value.code == "disk_full"
        assert not [p for p in node.objects.rglob("*") if p.is_file()]
        (hot / "strangers").unlink()
        with node.connect() as channel:
            assert read_shard(channel, dataset, 0) == shard_bytes(0, 3, 100 * KB)
    finally:
        node.kill()
        subprocess.run(["umount", str(hot)], check=True)


def test_many_processes_one_fetch(node: Node, make_dataset: MakeDataset):
    """S5 and F6: also the listing and the index."""
    url = make_dataset([20] * 4, 20 * KB)
    node.start()
    barrier = threading.Barrier(8)

    def load() -> None:
        with node.connect() as channel:
            dataset = register(channel, url)
            barrier.wait()
            for shard in range(4):
                assert read_shard(channel, dataset, shard) == shard_bytes(shard, 20, 20 * KB)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = node.stager()
    assert status.fetches == 4
    with node.connect() as channel:
        assert status.fetched_cold_bytes == register(channel, url).size_bytes


def test_each_shard_is_indexed_by_one_and_claims_come_back(node: Node, make_dataset: MakeDataset):
    """F6 and F24: whoever dies with a claim is replaced."""
    url = make_dataset([2, 2], KB)
    node.start()
    with node.connect() as one, node.connect() as other:
        dataset = register(one, url)
        first = one.request(ClaimIndex(dataset.id), expect=IndexTask)[0].shard
        second = other.request(ClaimIndex(dataset.id), expect=IndexTask)[0].shard
        assert {first, second} == {0, 1} and first is not None
        one.request(PublishIndex(dataset.id, first, 2, b"index"), expect=Done)
        waiting: list[int | None] = []
        thread = threading.Thread(
            target=lambda: waiting.append(one.request(ClaimIndex(dataset.id), expect=IndexTask)[0].shard)
        )
        thread.start()
        other.close()
        thread.join(5)
        assert waiting == [second]


def test_a_sessions_end_frees_what_it_held_within_a_second(node: Node, make_dataset: MakeDataset):
    """S7, with kill -9 of the process that held it."""
    url = make_dataset([3] * 4, 10 * KB)
    node.set(FOREBAY_STAGER__CAPACITY="130KB")
    node.start()
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.integration.test_stager import *
channel = Channel.connect(Path({str(node.settings.stager_socket)!r}), "holder")
dataset = register(channel, {url!r})
for shard in range(3):
    channel.request(NeedShard(dataset.id, shard), expect=ShardReady)
print("held", flush=True)
time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        assert node.stager().leased_bytes > 0
        holder.kill()
        killed_at = time.monotonic()
        assert eventually(lambda: node.stager().leased_bytes == 0, 1.0), time.monotonic() - killed_at
        with node.connect() as channel:
            assert read_shard(channel, register(channel, url), 3)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_a_descriptor_outlives_eviction_and_daemon(node: Node, make_dataset: MakeDataset):
    """F4: what was handed out stays readable, and is fetched again for the next."""
    url = make_dataset([3] * 6, 10 * KB)
    node.set(FOREBAY_STAGER__CAPACITY="80KB")
    node.start()
    with node.connect() as slow, node.connect() as fast:
        dataset = register(slow, url)
        reply, (fd,) = slow.request(NeedShard(dataset.id, 0), expect=ShardReady)
        slow.request(ReleaseShard(dataset.id, 0), expect=Done)
        for shard in range(1, 6):
            read_shard(fast, dataset, shard)
            fast.request(ReleaseShard(dataset.id, shard), expect=Done)
        fetches = node.stager().fetches
        assert os.fstat(fd).st_nlink == 0
        assert os.pread(fd, reply.size_bytes, 0) == shard_bytes(0, 3, 10 * KB)
        assert read_shard(fast, dataset, 0) == shard_bytes(0, 3, 10 * KB)
        assert node.stager().fetches == fetches + 1
    node.kill()
    assert os.pread(fd, reply.size_bytes, 0) == shard_bytes(0, 3, 10 * KB)
    os.close(fd)


def test_all_waiters_get_the_error_and_the_next_try_is_new(
    node: Node, make_dataset: MakeDataset, s3: S3Server, prefix: str
):
    """F24: nobody waits for ever for somebody else's failed fetch."""
    url = make_dataset([4, 4], KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
    data = bytes(obstore.get(s3.store(), f"{prefix}/shard-001.tar").bytes())
    obstore.delete(s3.store(), f"{prefix}/shard-001.tar")
    errors: list[str] = []

    def need() -> None:
        with node.connect() as channel, pytest.raises(ForebayError) as caught:
            read_shard(channel, dataset, 1)
        errors.append(caught.value.code)

    threads = [threading.Thread(target=need) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == ["object_not_found"] * 5
    obstore.put(s3.store(), f"{prefix}/shard-001.tar", data, use_multipart=False)
    with node.connect() as channel:
        assert read_shard(channel, dataset, 1) == data


def test_lookahead_fetches_before_anybody_asks(node: Node, make_dataset: MakeDataset):
    url = make_dataset([3] * 5, 10 * KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        channel.request(OpenPlan(dataset.id, [4, 2, 0, 1, 3], 1), expect=Done)
        assert eventually(lambda: node.stager().shards == 5)
        assert node.stager().sessions >= 1


def test_belady_keeps_fetches_near_the_optimum(node: Node, make_dataset: MakeDataset):
    """F5: a dataset larger than the tier, read in changing order, costs less than one fetch a shard."""
    import random

    url = make_dataset([2] * 20, 20 * KB)
    node.set(FOREBAY_STAGER__CAPACITY="600KB")
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        epochs = [random.Random(epoch).sample(range(20), 20) for epoch in range(6)]
        for epoch, order in enumerate(epochs[:-1]):
            channel.request(OpenPlan(dataset.id, order + epochs[epoch + 1], 1), expect=Done)
            for place, shard in enumerate(order):
                channel.request(Advance(place), expect=Done)
                read_shard(channel, dataset, shard)
                channel.request(ReleaseShard(dataset.id, shard), expect=Done)
        # 11 of 20 fit: the least possible is about 50, with LRU about 90.
        assert node.stager().fetches <= 70


def test_the_warm_tier_is_filled_and_used(
    node: Node, make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch
):
    """One node fetches from cold, the next from warm, and a damaged warm copy is never served."""
    url = make_dataset([5] * 3, 10 * KB)
    warm = node.home / "warm"
    node.set(FOREBAY_WARM__URL=str(warm))
    node.start()
    with node.connect() as channel:
        assert stage(channel, register(channel, url)).state == "done"
    objects = warm / "forebay/objects"
    assert eventually(lambda: len(list(objects.rglob("*.digest"))) == 3)
    data = sorted(p for p in objects.rglob("*") if p.is_file() and len(p.name) == 32)
    damaged = bytearray(data[0].read_bytes())
    damaged[100] ^= 1
    data[0].write_bytes(damaged)
    second = Node(node.home / "n2", monkeypatch)
    second.home.mkdir()
    second.set(FOREBAY_WARM__URL=str(warm))
    second.start()
    try:
        with second.connect() as channel:
            dataset = register(channel, url)
            for shard in range(3):
                assert read_shard(channel, dataset, shard) == shard_bytes(shard, 5, 10 * KB)
        status = second.stager()
        assert status.fetched_cold_bytes == dataset.largest_bytes
        assert status.fetched_warm_bytes == 2 * dataset.largest_bytes
    finally:
        second.close()


def test_two_daemons_cannot_share_a_directory(node: Node, s3: S3Server):
    node.start()
    with pytest.raises(DaemonUnavailable):
        node.start()
    assert "belongs to another running daemon" in node.log("stager")
