"""`forebay bench lockstep`: four ranks on two nodes from a source that is slow, for a while slower still.

Nodes are daemons and processes with homes and links of their own. Compute is emulated by sleeping, each step
ends in an all-reduce (gloo). The bound is what link and compute allow when nothing else costs any time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.loads import upload_tars
from forebay.benchmarks.report import Case, Report
from forebay.benchmarks.seaweed import S3Server, free_ports, running_server
from forebay.benchmarks.settings import environment
from forebay.benchmarks.throttle import Links, Schedule, throttled
from forebay.core.errors import InvalidRequest

_NODES, _RANKS = 2, 4
_BATCH, _SAMPLE_BYTES = 16, 50_000
_SHARDS, _SHARD_SAMPLES = 200, 50
_STEP_S = 0.2
# What a node needs is the whole batch of the job, unless it shares a warm tier with the other.
_SUPPLY = 1.5
_CUT_FROM_S, _CUT_S = 8.0, 8.0
_FIELD = "bin"


@dataclass(frozen=True)
class Job:
    """`urls`: of the dataset for ours, of the shards for peers."""

    urls: list[str]
    endpoints: list[str]
    homes: list[str]
    port: int
    out: str
    rank: int = 0

    @property
    def node(self) -> int:
        return self.rank * _NODES // _RANKS


def bench(seed: int) -> Report:
    """Each contestant reads the dataset once, from the same objects, by the same links."""
    with ExitStack() as stack:
        server = stack.enter_context(running_server())
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()))
        stack.enter_context(environment(**server.env))
        shard_bytes = upload_tars(server.store(), "lockstep", _SHARDS, _SHARD_SAMPLES, _SAMPLE_BYTES, seed)
        # The all-reduce is part of a step, as is whatever these cores cost it.
        step_s = _alone_s(Path(home) / "alone")
        cases = [
            _case("every node from the source", server, Path(home) / "cold", shard_bytes, step_s, warm=False),
            _case("a warm tier between", server, Path(home) / "warm", shard_bytes, step_s, warm=True),
            _peer_case(server, Path(home) / "peer", shard_bytes, step_s),
        ]
    ours, peer = cases[:2], cases[2]
    figures = {
        "step_time_over_bound": max(case.figures["step_time_over_bound"] for case in ours),
        "skew_p99_over_step": max(case.figures["skew_p99_over_step"] for case in ours),
        "peer_step_time_over_bound": peer.figures["step_time_over_bound"],
        "peer_skew_p99_over_step": peer.figures["skew_p99_over_step"],
        "step_s": step_s,
    }
    return Report("lockstep", figures, cases, seed)


def _schedules() -> list[Schedule]:
    rate = _SUPPLY * _RANKS * _BATCH * _SAMPLE_BYTES / _STEP_S
    cut = ((0.0, rate), (_CUT_FROM_S, rate / 2), (_CUT_FROM_S + _CUT_S, rate))
    return [Schedule(((0.0, rate),)), Schedule(cut)]


def bound(
    steps: int, step_bytes: float, step_s: float, schedules: list[Schedule]
) -> tuple[float, list[bool]]:
    """Seconds, if every step begins when its bytes are on every node and the step before is over; and in
    which steps the bytes are there first."""
    now_s, suffices = 0.0, list[bool]()
    for step in range(1, steps + 1):
        there_s = max(link.arrival_s(step * step_bytes) for link in schedules)
        suffices.append(there_s <= now_s)
        now_s = max(now_s, there_s) + step_s
    return now_s, suffices


def _case(name: str, server: S3Server, home: Path, shard_bytes: int, step_s: float, *, warm: bool) -> Case:
    home.mkdir()
    share = 1 / _NODES if warm else 1
    with ExitStack() as stack:
        links = stack.enter_context(throttled(server.port, _schedules()))
        job = _job(server, home, links)
        if warm:
            stack.enter_context(environment(FOREBAY_WARM__URL=str(home / "warm")))
        for node, endpoint in enumerate(job.endpoints):
            env = {
                "FOREBAY_HOME": job.homes[node],
                "AWS_ENDPOINT_URL": endpoint,
                "FOREBAY_NODE": f"node-{node}",
            }
            stack.enter_context(running_daemon("stager", env))
        return _figures(f"forebay, {name}", _run(_ours, job, links), shard_bytes, share, step_s)


def _peer_case(server: S3Server, home: Path, shard_bytes: int, step_s: float) -> Case:
    home.mkdir()
    with throttled(server.port, _schedules()) as links:
        job = _job(server, home, links)
        waits = _run(_webdataset, replace(job, urls=[f"{shard:03d}.tar" for shard in range(_SHARDS)]), links)
    return _figures("torch DataLoader with webdataset, s5cmd cat", waits, shard_bytes, 1 / _NODES, step_s)


def _alone_s(home: Path) -> float:
    """A step of the same ranks without any data."""
    home.mkdir()
    found = _run(
        _nothing, Job([], [""] * _NODES, [str(home)] * _NODES, free_ports(1)[0], str(home / "out.json"))
    )
    return float(found["seconds"]) / len(found["waits_s"][0])


def _job(server: S3Server, home: Path, links: Links) -> Job:
    endpoints = [f"http://127.0.0.1:{port}" for port in links.ports]
    homes = [str(home / f"node-{node}") for node in range(_NODES)]
    return Job([server.url("lockstep")], endpoints, homes, free_ports(1)[0], str(home / "out.json"))


def _figures(name: str, found: dict[str, Any], shard_bytes: int, share: float, step_s: float) -> Case:
    """`share` of the job's bytes comes over each link."""
    waits = found["waits_s"]
    steps = len(waits[0])
    step_bytes = shard_bytes / _SHARD_SAMPLES * _BATCH * _RANKS * share
    bound_s, suffices = bound(steps, step_bytes, step_s, _schedules())
    by_step = zip(*waits, strict=True)
    skews = [max(step) - min(step) for step, enough in zip(by_step, suffices, strict=True) if enough]
    figures = {
        "step_time_over_bound": found["seconds"] / bound_s,
        "skew_p99_over_step": statistics.quantiles(skews, n=100)[98] / step_s,
        "seconds": found["seconds"],
        "bound_s": bound_s,
        "first_wait_s": max(step[0] for step in waits),
        "wait_share": statistics.fmean(map(sum, waits)) / found["seconds"],
    }
    return Case(f"{name}: {steps} steps", figures)


def _run(batches: Callable[[Job], Iterable[Any]], job: Job, links: Links | None = None) -> dict[str, Any]:
    """All ranks, from the first ask to the last step. Raises InvalidRequest when one fails."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ranks = []
    for rank in range(_RANKS):
        started = theirs if rank == 0 else None
        ranks.append(context.Process(target=_rank, args=(batches, replace(job, rank=rank), started)))
    for process in ranks:
        process.start()
    theirs.close()
    with suppress(EOFError):
        began_at = ours.recv()
        if links:
            links.start(began_at, _schedules())
    for process in ranks:
        process.join()
    codes = [process.exitcode for process in ranks]
    if any(codes):
        raise InvalidRequest(f"ranks ended with {codes}; see above")
    found: dict[str, Any] = json.loads(Path(job.out).read_text())
    return found


def _rank(batches: Callable[[Job], Iterable[Any]], job: Job, started: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(job.rank), WORLD_SIZE=str(_RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port),
        FOREBAY_HOME=job.homes[job.node], FOREBAY_NODE=f"node-{job.node}",
        AWS_ENDPOINT_URL=job.endpoints[job.node],
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found, waits, gradient = batches(job), list[float](), torch.ones(1024)
    dist.barrier()
    began_at = time.monotonic()
    if started:
        started.send(began_at)
    iterator = iter(found)
    while True:
        asked_at = time.monotonic()
        if next(iterator, None) is None:
            break
        waits.append(time.monotonic() - asked_at)
        time.sleep(_STEP_S)
        dist.all_reduce(gradient)
    seconds = time.monotonic() - began_at
    everybody: list[Any] = [None] * _RANKS
    dist.all_gather_object(everybody, waits)
    if job.rank == 0:
        steps = min(map(len, everybody))
        Path(job.out).write_text(
            json.dumps({"seconds": seconds, "waits_s": [found[:steps] for found in everybody]})
        )
    dist.barrier()
    dist.destroy_process_group()


def _nothing(job: Job) -> Iterable[Any]:
    return range(100)


def _ours(job: Job) -> Iterable[Any]:
    from forebay.loaders import DataLoader, StagedDataset

    dataset = StagedDataset(job.urls[0], fields=(_FIELD,), decode="array")
    return DataLoader(dataset, _BATCH, shuffle=True, shuffle_block=2)


def _webdataset(job: Job) -> Iterable[Any]:
    """Shards split over nodes and workers, each streamed by the command that its documentation pipes from."""
    import sys

    import webdataset as wds

    s5cmd = Path(sys.executable).with_name("s5cmd")
    urls = [
        f"pipe:{s5cmd} --endpoint-url {job.endpoints[job.node]} cat s3://forebay/lockstep/{key}"
        for key in job.urls
    ]
    dataset = wds.WebDataset(
        urls, nodesplitter=wds.split_by_node, workersplitter=wds.split_by_worker, shardshuffle=False
    )
    steps = _SHARDS * _SHARD_SAMPLES // (_BATCH * _RANKS)
    # As in a script that torchrun starts: these ranks were spawned, and their workers would be, too.
    loader = wds.WebLoader(
        dataset.to_tuple(_FIELD).batched(_BATCH),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
    )
    return loader.with_epoch(steps)  # type: ignore[no-any-return]
