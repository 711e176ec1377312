"""Nodes that share a warm tier: by claim files, by Redis, and through a real shared file system."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.seaweed import S3Server, end_with_parent
from forebay.core.channel import Channel, ask
from forebay.core.protocol import Done, GetStatus, ReleaseShard, StageJob, StagerStatus
from forebay.loaders import DataLoader, StagedDataset
from forebay.stager.manifest import Manifest
from tests.conftest import Node, eventually, shard_bytes
from tests.integration.redis import redis_url, running_redis
from tests.integration.test_stager import MakeDataset, read_shard, register, stage

KB = 1000
NODES = 4
_QUICK = {"FOREBAY_WARM__STALE_S": "1", "FOREBAY_WARM__HEARTBEAT_S": "0.2"}


class Cluster:
    """Stagerds with homes of their own; `sockets` leads to each."""

    def __init__(self, home: Path, envs: list[dict[str, str]], stack: ExitStack) -> None:
        self.home = home
        self.sockets = [home / f"n{number}/run/stager.sock" for number in range(len(envs))]
        self.processes = [
            stack.enter_context(
                running_daemon(
                    "stager", {**_QUICK, **env, "FOREBAY_HOME": str(home / f"n{n}")}, home / f"n{n}.log"
                )
            )
            for n, env in enumerate(envs)
        ]

    def stage(self, url: str) -> list[StageJob]:
        """All of it on every node that is alive, at once."""
        jobs: dict[int, StageJob] = {}

        def one(number: int) -> None:
            with Channel.connect(self.sockets[number], "test") as channel:
                jobs[number] = stage(channel, register(channel, url))

        threads = [threading.Thread(target=one, args=(n,)) for n in self.alive()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(jobs) == len(threads)
        return list(jobs.values())

    def alive(self) -> list[int]:
        return [number for number, process in enumerate(self.processes) if process.poll() is None]

    def status(self) -> list[StagerStatus]:
        return [ask(self.sockets[n], GetStatus(), expect=StagerStatus) for n in self.alive()]

    def cold_bytes(self) -> int:
        return sum(status.fetched_cold_bytes for status in self.status())

    def check(self, url: str, samples: list[int], sample_bytes: int) -> None:
        """Every node has the right bytes."""
        for number in self.alive():
            with Channel.connect(self.sockets[number], "test") as channel:
                dataset = register(channel, url)
                for shard, count in enumerate(samples):
                    assert read_shard(channel, dataset, shard) == shard_bytes(shard, count, sample_bytes)
                    channel.request(ReleaseShard(dataset.id, shard), expect=Done)

    def log(self, number: int) -> str:
        return (self.home / f"n{number}.log").read_text()


MakeCluster = Callable[[list[dict[str, str]]], Cluster]


@pytest.fixture
def cluster(node: Node, s3: S3Server) -> Iterator[MakeCluster]:
    with ExitStack() as stack:
        yield lambda envs: Cluster(node.home, envs, stack)


@pytest.fixture
def redis_server(node: Node) -> Iterator[subprocess.Popen[bytes]]:
    with running_redis(node.home) as process:
        yield process


@pytest.fixture
def warm_env(node: Node) -> dict[str, str]:
    return {"FOREBAY_WARM__URL": str(node.home / "warm")}


@pytest.fixture
def redis_env(warm_env: dict[str, str], redis_server: subprocess.Popen[bytes]) -> dict[str, str]:
    return {**warm_env, "FOREBAY_WARM__COORDINATOR": redis_url(redis_server)}


@pytest.mark.parametrize("env", ["warm_env", "redis_env"])
def test_four_nodes_fetch_each_shard_from_cold_once(
    cluster: MakeCluster, request: pytest.FixtureRequest, make_dataset: MakeDataset, env: str
):
    """S5 with a warm tier, by claim files or by Redis."""
    four = cluster([request.getfixturevalue(env)] * NODES)
    samples = [5] * 12
    url = make_dataset(samples, 10 * KB)
    jobs = four.stage(url)
    assert all(job.state == "done" for job in jobs)
    assert four.cold_bytes() == jobs[0].bytes_total
    four.check(url, samples, 10 * KB)


def test_redis_holds_nothing_afterwards_and_no_claim_files_are_made(
    cluster: MakeCluster, node: Node, redis_env: dict[str, str], make_dataset: MakeDataset
):
    two = cluster([redis_env] * 2)
    two.stage(make_dataset([5] * 4, 10 * KB))
    assert redis.Redis.from_url(redis_env["FOREBAY_WARM__COORDINATOR"]).keys() == []
    assert not (node.home / "warm/forebay/claims").exists()


def claimed_by_the_dead(node: Node, url: str, claim: Callable[[str], None]) -> None:
    """A claim on each shard of a registered dataset, by a node that never shows itself."""
    (path,) = (node.home / "n1/stager/manifests").iterdir()
    for shard in range(2):
        claim(Manifest(path, url).shard(shard).id)


def test_a_claim_file_of_a_dead_node_is_taken_over(
    cluster: MakeCluster, node: Node, warm_env: dict[str, str], make_dataset: MakeDataset
):
    """F24: the node that fetches for all is killed; the others go on without it."""
    four = cluster([warm_env] * NODES)
    url = make_dataset([5] * 2, 10 * KB)

    def claim(object_id: str) -> None:
        path = node.home / "warm/forebay/claims" / object_id[:2] / object_id
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("dead-node 1")

    with Channel.connect(four.sockets[1], "test") as channel:
        dataset = register(channel, url)
        claimed_by_the_dead(node, url, claim)
        assert read_shard(channel, dataset, 0) == shard_bytes(0, 5, 10 * KB)
    four.processes[0].kill()
    four.processes[0].wait()
    assert all(job.state == "done" for job in four.stage(url))


def test_a_redis_claim_of_a_dead_node_runs_out(
    cluster: MakeCluster, node: Node, redis_env: dict[str, str], make_dataset: MakeDataset
):
    two = cluster([redis_env] * 2)
    url = make_dataset([5] * 2, 10 * KB)
    server = redis.Redis.from_url(redis_env["FOREBAY_WARM__COORDINATOR"])

    def claim(object_id: str) -> None:
        server.set(f"forebay/claims/{object_id[:2]}/{object_id}", "dead-node", px=1500)

    with Channel.connect(two.sockets[1], "test") as channel:
        dataset = register(channel, url)
        claimed_by_the_dead(node, url, claim)
        assert len(server.keys()) == 2
        assert read_shard(channel, dataset, 0) == shard_bytes(0, 5, 10 * KB)
        # It waited until the claim had run out, and the other one has by then as well.
        assert b"dead-node" not in server.mget(server.keys("*") or ["none"])


def test_a_redis_that_goes_away_is_a_miss_said_once(
    cluster: MakeCluster,
    redis_env: dict[str, str],
    redis_server: subprocess.Popen[bytes],
    make_dataset: MakeDataset,
):
    """Correctness never rests on it: everybody may fetch then."""
    two = cluster([redis_env] * 2)
    redis_server.kill()
    redis_server.wait()
    samples = [2] * 20
    url = make_dataset(samples, KB)
    assert all(job.state == "done" for job in two.stage(url))
    two.check(url, samples, KB)
    # A node that found every shard in the warm tier had nothing to claim, so nothing to say.
    said = [two.log(number).count("warm tier fails") for number in range(2)]
    assert max(said) >= 1
    assert all(times <= 3 for times in said)


def test_a_warm_tier_that_fails_is_a_miss_said_once(
    cluster: MakeCluster, node: Node, warm_env: dict[str, str], make_dataset: MakeDataset
):
    """Read-only from the start: cold serves, one line of log for each action."""
    one = cluster([warm_env])
    warm = node.home / "warm"
    warm.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,ro", "tmpfs", str(warm)], check=True)
    try:
        assert one.stage(make_dataset([2] * 20, KB))[0].state == "done"
        assert 1 <= one.log(0).count("warm tier fails") <= 4
    finally:
        subprocess.run(["umount", str(warm)], check=True)


@contextmanager
def weed_mount(server: S3Server, folder: Path, log: Path) -> Iterator[None]:
    """SeaweedFS as a shared file system (FUSE); each mount has caches of its own, as each node has."""
    (folder.parent / f"{folder.name}-cache").mkdir()
    folder.mkdir()
    command = [
        str(Path(sys.executable).with_name("weed")), "mount", f"-filer={server.filer}", f"-dir={folder}",
        "-filer.path=/shared", "-dirAutoCreate", f"-cacheDir={folder.parent / f'{folder.name}-cache'}",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=end_with_parent)
    try:
        assert eventually(folder.is_mount, 20), log.read_text()
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
        process.kill()
        process.wait()


@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="the kernel has no FUSE")
def test_a_shared_file_system_mounted_twice_is_a_warm_tier(
    cluster, node: Node, s3: S3Server, make_dataset: MakeDataset
):
    """Two mounts with caches of their own, two nodes on each: the bytes are right, cold is spared."""
    samples = [5] * 12 + [60]
    url = make_dataset(samples, 10 * KB)
    mounts = [node.home / "mount-a", node.home / "mount-b"]
    with weed_mount(s3, mounts[0], node.home / "a.log"), weed_mount(s3, mounts[1], node.home / "b.log"):
        four = cluster([{"FOREBAY_WARM__URL": str(mounts[number % 2])} for number in range(NODES)])
        jobs = four.stage(url)
        assert all(job.state == "done" for job in jobs)
        four.check(url, samples, 10 * KB)
        assert four.cold_bytes() < NODES * jobs[0].bytes_total
        for number in four.alive():
            four.processes[number].kill()
            four.processes[number].wait()


def test_what_one_node_has_indexed_the_others_know(
    node: Node, make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch
):
    """`len()` on another node reads no shard; a copy that is damaged is made again."""
    samples = [7, 1, 0, 23]
    url = make_dataset(samples, 2 * KB)
    env = {"FOREBAY_WARM__URL": str(node.home / "warm")}
    with ExitStack() as stack:
        cluster = Cluster(node.home, [env] * 2, stack)
        lengths = []
        for number in range(2):
            monkeypatch.setenv("FOREBAY_HOME", str(node.home / f"n{number}"))
            lengths.append(len(DataLoader(StagedDataset(url, fields=("__key__",)), 1)))
        assert lengths == [31, 31]
        first, second = cluster.status()
        assert first.fetches == 4 and second.fetches == 0
        # Another way to cut: nobody knows it yet. Then its copies are damaged.
        other = StagedDataset(url, fields=("__key__",), split="last")
        assert len(DataLoader(other, 1)) == 31
        for path in (node.home / "warm/forebay/indices").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        monkeypatch.setenv("FOREBAY_HOME", str(node.home / "n0"))
        assert [keys for (keys,) in DataLoader(other, 31)] == [
            [f"{shard:03d}-{number:04d}" for shard, count in enumerate(samples) for number in range(count)]
        ]
        assert "is damaged, the shard is indexed again" in (node.home / "n0.log").read_text()
