"""stagerd in full: jobs, pins, quotas, disks, warm tier with several nodes, restart, reload, drain."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import obstore
import pytest

from forebay.benchmarks import jobs
from forebay.benchmarks.jobs import follow, run_job
from forebay.benchmarks.seaweed import S3Server
from forebay.core.channel import ask
from forebay.core.errors import ForebayError, NotFound, TierFull
from forebay.core.protocol import (
    AddPin,
    CancelJob,
    Done,
    DropPin,
    Evict,
    Evicted,
    GetStatus,
    JobReply,
    ListPins,
    PinReply,
    Pins,
    Register,
    ReleaseShard,
    RetryJob,
    Selection,
    Stage,
    StagerStatus,
)
from tests.conftest import Node, eventually, shard_bytes, stats_below
from tests.integration.test_stager import MakeDataset, read_shard, register, stage

KB = 1000


def staged(node: Node) -> list[Path]:
    return [p for p in node.objects.rglob("*") if p.is_file() and len(p.name) == 32]


def test_a_job_stages_what_was_selected(node: Node, make_dataset: MakeDataset):
    url = make_dataset([1] * 10, KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        job = run_job(channel, Stage(dataset.id, Selection(glob="shard-00[2-4]*")))
        assert (job.state, job.shards_total, job.shards_done) == ("done", 3, 3)
        assert len(staged(node)) == 3
        sample = run_job(channel, Stage(dataset.id, Selection(sample=0.5)))
        assert (
            sample.shards_total == 5 == run_job(channel, Stage(dataset.id, Selection(sample=0.5))).shards_done
        )
        keys = ["shard-009.tar", "shard-000.tar"]
        assert run_job(channel, Stage(dataset.id, Selection(keys=keys))).shards_done == 2
        with pytest.raises(NotFound, match="no shard 'nope'"):
            channel.request(Stage(dataset.id, Selection(keys=["nope"])), expect=JobReply)
        with pytest.raises(ForebayError, match="no warm tier"):
            channel.request(Stage(dataset.id, tier="warm"), expect=JobReply)


def test_a_cancelled_job_takes_nothing_from_others(node: Node, make_dataset: MakeDataset):
    """Two jobs on the same shards: one is called off, the other is complete."""
    url = make_dataset([20] * 30, 20 * KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        first = channel.request(Stage(dataset.id, owner="a"), expect=JobReply)[0].job
        second = channel.request(Stage(dataset.id, owner="b"), expect=JobReply)[0].job
        cancelled = channel.request(CancelJob(first.id), expect=JobReply)[0].job
        assert cancelled.state in ("cancelled", "done")
        second = follow(channel, second)
        assert (second.state, second.shards_done, second.bytes_done) == ("done", 30, dataset.size_bytes)


def test_a_failed_shard_is_listed_and_tried_again(
    node: Node, make_dataset: MakeDataset, s3: S3Server, prefix: str
):
    """F29: partial is not done; counts add up; after the source is whole again a retry completes it."""
    url = make_dataset([2] * 4, KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        key = f"{prefix}/shard-002.tar"
        body = obstore.get(s3.store(), key).bytes()
        obstore.delete(s3.store(), key)
        job = stage(channel, dataset)
        assert (job.state, job.shards_done, list(job.failed)) == ("partial", 3, ["shard-002.tar"])
        assert job.shards_done + len(job.failed) == job.shards_total
        obstore.put(s3.store(), key, body, use_multipart=False)
        job = channel.request(RetryJob(job.id), expect=JobReply)[0].job
        job = follow(channel, job)
        assert (job.state, job.shards_done, job.failed) == ("done", 4, {})


def test_what_is_pinned_stays_and_says_whose_it_is(node: Node, make_dataset: MakeDataset, s3: S3Server):
    """Owner, restart, expiry; a job that cannot fit beside it is refused at once."""
    url = make_dataset([3] * 6, 10 * KB)
    node.set(FOREBAY_STAGER__CAPACITY="240KB")
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        chosen = Selection(keys=["shard-000.tar", "shard-001.tar"])
        pin = channel.request(AddPin(dataset.id, "alice", chosen), expect=PinReply)[0].pin
        assert run_job(channel, Stage(dataset.id, chosen)).state == "done"
    node.kill()
    node.start()
    with node.connect() as channel:
        assert [p.owner for p in channel.request(ListPins(), expect=Pins)[0].pins] == ["alice"]
        for _ in range(2):
            for shard in range(2, 6):
                read_shard(channel, dataset, shard)
                channel.request(ReleaseShard(dataset.id, shard), expect=Done)
        before = node.stager().fetches
        for shard in range(2):
            read_shard(channel, dataset, shard)
            channel.request(ReleaseShard(dataset.id, shard), expect=Done)
        assert node.stager().fetches == before, "the pinned ones were never given up"
        with pytest.raises(TierFull, match=r"are pinned: .* by alice"):
            channel.request(Stage(dataset.id, Selection(glob="shard-00[2-5]*")), expect=JobReply)
        gone = channel.request(Evict(dataset.id), expect=Evicted)[0]
        assert gone.kept == 2
        channel.request(DropPin(pin.id), expect=Done)
        short = channel.request(AddPin(dataset.id, "bob", chosen, ttl_s=0.05), expect=PinReply)[0].pin
        assert short.expires_at and eventually(
            lambda: not channel.request(ListPins(), expect=Pins)[0].pins, 5
        )


def test_a_tenants_quota_holds(node: Node, make_dataset: MakeDataset):
    url = make_dataset([3] * 6, 10 * KB)
    node.set(FOREBAY_STAGER__QUOTAS='{"small": "90KB"}')
    node.start()
    with node.connect() as channel:
        dataset = jobs.register(channel, Register(url, tenant="small"))
        for shard in range(6):
            read_shard(channel, dataset, shard)
            channel.request(ReleaseShard(dataset.id, shard), expect=Done)
            assert node.stager().held_bytes <= 90 * KB
        assert node.stager().evictions == 4


def test_a_tenants_quota_counts_what_is_on_its_way(node: Node, make_dataset: MakeDataset):
    """Six ranks at once, each fetch held up before its end: never more than the quota."""
    url = make_dataset([3] * 6, 10 * KB)
    node.set(FOREBAY_STAGER__QUOTAS='{"small": "90KB"}', FOREBAY_FAILPOINTS="landing.verified=delay:0.3")
    node.start()
    with node.connect() as channel:
        dataset = jobs.register(channel, Register(url, tenant="small"))

    def read(shard: int) -> None:
        with node.connect() as channel:
            assert read_shard(channel, dataset, shard) == shard_bytes(shard, 3, 10 * KB)

    threads = [threading.Thread(target=read, args=(shard,)) for shard in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        status = node.stager()
        assert status.held_bytes + status.reserved_bytes <= 90 * KB
    for thread in threads:
        thread.join()
    assert node.stager().fetches == 6


def test_a_lost_catalog_is_rebuilt_from_what_the_files_say(node: Node, make_dataset: MakeDataset):
    """F26: deleted or damaged; nothing is fetched again, nothing wrong is served."""
    url = make_dataset([5] * 6, 10 * KB)
    node.start()
    with node.connect() as channel:
        assert stage(channel, register(channel, url)).state == "done"
    node.kill()
    catalog = node.settings.home / "stager/catalog.db"
    for name in ("catalog.db-wal", "catalog.db-shm"):
        catalog.with_name(name).unlink(missing_ok=True)
    catalog.write_bytes(b"not a database" * 1000)
    damaged = sorted(staged(node))[0]
    body = bytearray(damaged.read_bytes())
    body[5000] ^= 1
    damaged.write_bytes(body)
    node.start()
    assert eventually(lambda: node.stager().shards == 6)
    with node.connect() as channel:
        dataset = register(channel, url)
        for shard in range(6):
            assert read_shard(channel, dataset, shard) == shard_bytes(shard, 5, 10 * KB)
    assert node.stager().fetches == 1
    assert len(list((node.settings.hot_dirs[0] / "forebay/quarantine").iterdir())) == 1


def test_several_disks_are_one_tier_and_one_that_fails_is_gone_around(node: Node, make_dataset: MakeDataset):
    """A real file system with another, read-only one in its place for a while."""
    url = make_dataset([3] * 16, 10 * KB)
    disks = [node.home / "d0", node.home / "d1"]
    for disk in disks:
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    try:
        node.set(FOREBAY_STAGER__HOT_DIR=":".join(map(str, disks)), FOREBAY_STAGER__CAPACITY="6MB")
        node.start()
        with node.connect() as channel:
            dataset = register(channel, url)
            assert stage(channel, dataset).state == "done"
            counts = [len([p for p in d.rglob("*") if len(p.name) == 32]) for d in disks]
            assert min(counts) > 0 and sum(counts) == 16
            channel.request(Evict(dataset.id), expect=Evicted)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disks[0])], check=True)
            for shard in range(16):
                assert read_shard(channel, dataset, shard) == shard_bytes(shard, 3, 10 * KB)
                channel.request(ReleaseShard(dataset.id, shard), expect=Done)
            states = {d.folder: d.state for d in node.stager().disks}
            assert states[str(disks[0])] in ("out", "probing") and states[str(disks[1])] == "healthy"
            subprocess.run(["umount", str(disks[0])], check=True)
            assert eventually(lambda: all(d.state == "healthy" for d in node.stager().disks), 20)
    finally:
        node.kill()
        for disk in disks:
            subprocess.run(["umount", str(disk)], check=True)


def test_the_warm_tier_is_kept_below_its_capacity(node: Node, make_dataset: MakeDataset):
    warm = node.home / "warm"
    node.set(FOREBAY_WARM__URL=str(warm), FOREBAY_WARM__CAPACITY="150KB")
    url = make_dataset([3] * 10, 10 * KB)
    node.start()
    with node.connect() as channel:
        assert stage(channel, register(channel, url)).state == "done"

    def size() -> int:
        found = stats_below(warm / "forebay/objects")
        return sum(stat.st_size for path, stat in found.items() if len(path.name) == 32)

    assert eventually(lambda: 0 < size() <= 150 * KB)


def test_limits_are_reloaded_and_a_mistake_leaves_the_old_ones(node: Node):
    config = node.home / "forebay.toml"
    config.write_text('[stager]\ncapacity = "10MB"\n')
    node.set(FOREBAY_CONFIG=str(config))
    process, socket = node.start(), node.settings.stager_socket

    def capacity_bytes() -> int:
        return ask(socket, GetStatus(), expect=StagerStatus).capacity_bytes

    assert capacity_bytes() == 10_000_000
    config.write_text('[stager]\ncapacity = "20MB"\n')
    process.send_signal(signal.SIGHUP)
    assert eventually(lambda: capacity_bytes() == 20_000_000)
    config.write_text("[stager]\nno_such_key = 1\n")
    process.send_signal(signal.SIGHUP)
    assert eventually(lambda: "not reloaded" in node.log("stager"))
    assert capacity_bytes() == 20_000_000


def test_sigterm_ends_within_the_bound_and_nothing_is_half_there(node: Node, make_dataset: MakeDataset):
    url = make_dataset([60] * 30, 30 * KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        channel.request(Stage(dataset.id), expect=JobReply)
        began_at = time.monotonic()
        node.stop("stager")
        assert time.monotonic() - began_at < node.settings.stager.drain_s + 5
    for path in staged(node):
        assert path.stat().st_size == dataset.largest_bytes
    node.start()
    with node.connect() as channel:
        assert stage(channel, dataset).state == "done"


def test_names_of_all_kinds_coexist(node: Node, s3: S3Server, prefix: str):
    """F31: same base name in two prefixes, `a` and `a/b`, spaces, unicode, 200 bytes."""
    names = ["a", "b/a", "b/c/a", "x y", "ünï/çødé", "n" * 200, "p%2Fq", "q?r#s"]
    for number, name in enumerate(names):
        obstore.put(s3.store(), f"{prefix}/{name}", f"{number}".encode(), use_multipart=False)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, s3.url(prefix), "raw")
        assert dataset.shards == len(names)
        found = sorted(read_shard(channel, dataset, shard).decode() for shard in range(len(names)))
        assert found == sorted(str(number) for number in range(len(names)))


def test_the_catalog_is_not_read_at_start(node: Node):
    """F26 in small (the bench has two millions): its totals are, and they are right."""
    node.start()
    node.kill()
    disk = str(node.settings.hot_dirs[0])
    with sqlite3.connect(node.settings.home / "stager/catalog.db") as db:
        rows = ((f"{n:032x}", disk, "", 1, 4096, "", "", 0.0, 0.0) for n in range(20_000))
        db.executemany("INSERT INTO objects VALUES (?,?,?,?,?,?,?,?,?)", rows)
    db.close()
    node.start()
    assert (node.stager().shards, node.stager().held_bytes) == (20_000, 20_000 * 4096)
