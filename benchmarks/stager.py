"""`forebay bench stager`: scale, hand-over of descriptors, demands beside a stage job, bytes from cold."""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import obstore

from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.jobs import register, run_job
from forebay.benchmarks.listing import listing_server
from forebay.benchmarks.report import Case, Report
from forebay.benchmarks.seaweed import S3Server, running_server
from forebay.benchmarks.settings import environment
from forebay.core.channel import Channel, ask, close_all
from forebay.core.config import Settings
from forebay.core.journal import Journal
from forebay.core.protocol import (
    Dataset,
    Done,
    Evict,
    Evicted,
    GetStatus,
    NeedShard,
    Register,
    ReleaseShard,
    ShardReady,
    Stage,
    StageJob,
    StagerStatus,
)
from forebay.stager.catalog import Catalog
from forebay.stager.manifest import Manifest
from forebay.stager.schema import MIGRATIONS

_HANDOVERS = 20_000
_DEMANDS = 150
_LOOKUPS = 20_000
_NODES = 4
_LOADERS = 8
_MIB = 1 << 20


def bench(shards: int, seed: int) -> Report:
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        cases = [_scale(folder / "scale", shards, seed)]
        with running_server() as server, environment(**server.env):
            cases += [
                _handover(server, folder / "handover", seed),
                _demand(server, folder / "demand", seed),
                _amplification(server, folder / "warm", seed),
            ]
    figures = {key: value for case in cases for key, value in case.figures.items()}
    return Report("stager", figures, cases, seed)


def _scale(home: Path, shards: int, seed: int) -> Case:
    """A dataset of that many shards, and a catalog in which all of them are staged."""
    figures: dict[str, float] = {}
    keys = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}
    with listing_server(shards) as endpoint, environment(
        **keys, AWS_ENDPOINT_URL=endpoint, FOREBAY_HOME=str(home), FOREBAY_STAGER__CAPACITY="1EB"
    ):  # fmt: skip
        with running_daemon("stager", {}) as daemon:
            began_at = time.perf_counter()
            dataset = _register("s3://bucket")
            figures["registration_s"] = time.perf_counter() - began_at
            figures["registration_rss_mb"] = _peak_bytes(daemon.pid) / 1e6
        (path,) = (home / "stager/manifests").iterdir()
        manifest = Manifest(path, "s3://bucket")
        _fill_catalog(home / "stager/catalog.db", manifest, str(home / "hot"))
        began_at = time.perf_counter()
        with running_daemon("stager", {}):
            figures["start_s"] = time.perf_counter() - began_at
            status = ask(Settings.load().stager_socket, GetStatus(), expect=StagerStatus)
        assert status.shards == dataset.shards == shards
        figures |= _lookups(home / "stager/catalog.db", manifest, seed)
    note = "start_s from exec to ready, the interpreter's own start and imports included"
    return Case(f"{shards:,} shards", figures, {}, note)


def _fill_catalog(path: Path, manifest: Manifest, disk: str) -> None:
    rows = ((f"{high:016x}{low:016x}", disk, "", 4096, 4096, "", "", 0.0, 0.0) for high, low in manifest.ids)
    with sqlite3.connect(path) as db:
        db.executemany("INSERT INTO objects VALUES (?,?,?,?,?,?,?,?,?)", rows)
    db.close()


def _lookups(path: Path, manifest: Manifest, seed: int) -> dict[str, float]:
    """By key, by id in the dataset, by id in the catalog: all three are what one request needs."""
    noise = random.Random(seed)
    numbers = [noise.randrange(len(manifest)) for _ in range(_LOOKUPS)]
    keys = manifest.keys(np.array(numbers))
    journal = Journal(path, MIGRATIONS, durable=False)
    catalog = Catalog(journal)
    manifest.number_of("0" * 32)
    took = []
    for number, key in zip(numbers, keys, strict=True):
        began_at = time.perf_counter()
        found = manifest.find(key)
        took.append(time.perf_counter() - began_at)
        assert found == number
        object_id = manifest.shard(number).id
        began_at = time.perf_counter()
        found, held = manifest.number_of(object_id), catalog.get(object_id)
        took.append(time.perf_counter() - began_at)
        assert found == number and held is not None
    journal.close()
    return {"lookup_p99_us": float(np.percentile(took, 99)) * 1e6}


def _handover(server: S3Server, home: Path, seed: int) -> Case:
    _upload(server, "handover", 1, _MIB, seed)
    with environment(FOREBAY_HOME=str(home)), running_daemon("stager", {}):
        dataset = _register(server.url("handover"))
        with Channel.connect(Settings.load().stager_socket, "bench") as channel:
            _need(channel, dataset, 0)
            began_at = time.perf_counter()
            for _ in range(_HANDOVERS):
                _need(channel, dataset, 0)
            per_s = _HANDOVERS / (time.perf_counter() - began_at)
    return Case("one connection, one staged shard", {"handovers_per_s": per_s})


def _demand(server: S3Server, home: Path, seed: int) -> Case:
    """The wait of a rank for a shard that is not staged, alone, then while a job takes all it can get."""
    _upload(server, "demand", 2 * _DEMANDS, _MIB, seed)
    _upload(server, "bulk", 128, 4 * _MIB, seed)
    with environment(FOREBAY_HOME=str(home)), running_daemon("stager", {}):
        dataset, bulk = _register(server.url("demand")), _register(server.url("bulk"))
        moving, ended = threading.Event(), threading.Event()
        rounds: list[int] = []
        with Channel.connect(Settings.load().stager_socket, "bench") as channel:
            alone = [_timed_need(channel, dataset, number) for number in range(_DEMANDS)]
            worker = threading.Thread(target=_stage_for_ever, args=(bulk, moving, ended, rounds))
            worker.start()
            moving.wait()
            beside = [_timed_need(channel, dataset, _DEMANDS + number) for number in range(_DEMANDS)]
            ended.set()
            worker.join()
    p99_alone, p99_beside = (float(np.percentile(waits, 99)) for waits in (alone, beside))
    p50_alone, p50_beside = (float(np.percentile(waits, 50)) for waits in (alone, beside))
    figures = {
        "demand_p99_alone_ms": p99_alone * 1e3,
        "demand_p99_ms": p99_beside * 1e3,
        "demand_p99_ratio": p99_beside / p99_alone,
        "demand_p50_ratio": p50_beside / p50_alone,
        "bulk_rounds": float(len(rounds)),
    }
    return Case("demands of 1 MiB beside a stage job of 128 x 4 MiB, over and over", figures)


def _stage_for_ever(
    bulk: Dataset, moving: threading.Event, ended: threading.Event, rounds: list[int]
) -> None:
    def stop(job: StageJob) -> bool:
        if job.shards_done:
            moving.set()
        return ended.is_set()

    with Channel.connect(Settings.load().stager_socket, "bench") as channel:
        while not ended.is_set():
            run_job(channel, Stage(bulk.id), stop)
            moving.set()
            channel.request(Evict(bulk.id), expect=Evicted)
            rounds.append(1)


def _amplification(server: S3Server, home: Path, seed: int) -> Case:
    """Four nodes with one warm tier, each in need of everything at once; one node with eight loaders."""
    dataset_bytes = 96 * 2 * _MIB
    _upload(server, "warm", 96, 2 * _MIB, seed)
    with environment(FOREBAY_WARM__URL=str(home / "warm")):
        cold_bytes = _nodes(server, home, _NODES, _stage_whole)
    with environment(FOREBAY_HOME=str(home / "alone")), running_daemon("stager", {}):
        _at_once(_LOADERS, _read_whole, server.url("warm"), Settings.load().stager_socket)
        alone_bytes = ask(Settings.load().stager_socket, GetStatus(), expect=StagerStatus).fetched_cold_bytes
    figures = {
        "cold_amplification": cold_bytes / dataset_bytes,
        "cold_amplification_one_node": alone_bytes / dataset_bytes,
    }
    return Case(f"{_NODES} nodes with a warm tier; one node with {_LOADERS} loaders", figures)


def _nodes(server: S3Server, home: Path, count: int, work: Callable[[str, Path], None]) -> int:
    sockets = []
    with ExitStack() as stack:
        for number in range(count):
            node = {"FOREBAY_HOME": str(home / f"node-{number}")}
            stack.enter_context(running_daemon("stager", node))
            with environment(**node):
                sockets.append(Settings.load().stager_socket)
        processes = [_process(work, server.url("warm"), socket) for socket in sockets]
        _joined(processes)
        found = [ask(socket, GetStatus(), expect=StagerStatus) for socket in sockets]
    return sum(status.fetched_cold_bytes for status in found)


def _at_once(count: int, work: Callable[[str, Path], None], url: str, socket: Path) -> None:
    _joined([_process(work, url, socket) for _ in range(count)])


def _process(work: Callable[[str, Path], None], url: str, socket: Path) -> multiprocessing.Process:
    process = multiprocessing.get_context("spawn").Process(target=work, args=(url, socket))
    process.start()
    return process  # type: ignore[return-value]


def _joined(processes: list[multiprocessing.Process]) -> None:
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes)


def _stage_whole(url: str, socket: Path) -> None:
    with Channel.connect(socket, "bench") as channel:
        run_job(channel, Stage(register(channel, Register(url, "raw")).id))


def _read_whole(url: str, socket: Path) -> None:
    with Channel.connect(socket, "bench") as channel:
        dataset = register(channel, Register(url, "raw"))
        for number in range(dataset.shards):
            _need(channel, dataset, number)


def _register(url: str) -> Dataset:
    with Channel.connect(Settings.load().stager_socket, "bench") as channel:
        return register(channel, Register(url, "raw"))


def _need(channel: Channel, dataset: Dataset, number: int) -> None:
    _, fds = channel.request(NeedShard(dataset.id, number), expect=ShardReady, timeout_s=120)
    close_all(fds)


def _timed_need(channel: Channel, dataset: Dataset, number: int) -> float:
    began_at = time.perf_counter()
    _need(channel, dataset, number)
    took_s = time.perf_counter() - began_at
    channel.request(ReleaseShard(dataset.id, number), expect=Done)
    return took_s


def _upload(server: S3Server, prefix: str, objects: int, object_bytes: int, seed: int) -> None:
    noise = random.Random(seed)
    for number in range(objects):
        body = noise.randbytes(object_bytes)
        obstore.put(server.store(), f"{prefix}/{number:05d}", body, use_multipart=False)


def _peak_bytes(pid: int) -> int:
    """proc(5), status: VmHWM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)
