"""From memory to the disk and upstream, beside `dd` and `s5cmd`; and what the trainer notices of it."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.host import DD_BLOCK_BYTES, confine, dd
from forebay.benchmarks.peers.checkpoint import (
    Save,
    State,
    dcp_async_process,
    dcp_async_thread,
    one_process_group,
)
from forebay.benchmarks.report import Case
from forebay.benchmarks.seaweed import running_server
from forebay.benchmarks.settings import environment
from forebay.checkpointd import Checkpointer

_ROUNDS = 9
_QUIET_S = 1.0
_LONGEST_S = 60.0
_DRAIN_NOTE = "dd seconds / ours, median of pairs; digest and fsync included"
_UPLOAD_NOTE = "s5cmd seconds / ours, median of pairs; ours is verified afterwards"


def drain(state: State) -> Case:
    """Absorbed to fsynced, against `dd oflag=direct conv=fsync` of as many bytes, in turns."""
    ratios, ours_bps = [], []
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as folder:
        home = environment(FOREBAY_HOME=f"{folder}/home", FOREBAY_CHECKPOINT__KEEP_LOCAL="100")
        with home, running_daemon("checkpoint", {}), Checkpointer("bench") as checkpoints:
            checkpoints.prepare(state, wait=True)
            for step in range(_ROUNDS):
                status = checkpoints.save(step, state).wait()
                assert status.local_at is not None
                ours_s = status.local_at - status.absorbed_at
                blocks = f"count={status.size_bytes // DD_BLOCK_BYTES}"
                theirs_s = dd("if=/dev/zero", f"of={folder}/{step}", blocks, "oflag=direct", "conv=fsync")
                ratios.append(theirs_s / ours_s)
                ours_bps.append(status.size_bytes / ours_s)
    figures = {"drain_over_disk": statistics.median(ratios), "drain_bps": statistics.median(ours_bps)}
    return Case("memory to NVMe", figures, note=_DRAIN_NOTE)


def upload(state: State) -> Case:
    """Local to durable (put, then verified), against `s5cmd cp` of the same file to the same server."""
    ratios, ours_bps = [], []
    s5cmd = Path(sys.executable).with_name("s5cmd")
    with (
        running_server() as server,
        tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as folder,
        environment(FOREBAY_HOME=f"{folder}/home", FOREBAY_CHECKPOINT__KEEP_LOCAL="100", **server.env),
        running_daemon("checkpoint", {}),
        Checkpointer("bench", upstream=server.url("ckpt")) as checkpoints,
    ):
        checkpoints.prepare(state, wait=True)
        for step in range(_ROUNDS):
            status = checkpoints.save(step, state).wait()
            assert status.local_at is not None and status.durable_at is not None
            (file,) = Path(folder).rglob(f"*/step-{step:09d}/*/rank-00000.safetensors")
            began_at = time.perf_counter()
            command = [
                str(s5cmd),
                "--endpoint-url",
                server.endpoint,
                "cp",
                str(file),
                server.url(f"s5cmd/{step}"),
            ]
            subprocess.run(command, check=True, capture_output=True)
            theirs_s = time.perf_counter() - began_at
            ours_s = status.durable_at - status.local_at
            ratios.append(theirs_s / ours_s)
            ours_bps.append(status.size_bytes / ours_s)
    figures = {"upload_over_s5cmd": statistics.median(ratios), "upload_bps": statistics.median(ours_bps)}
    return Case("NVMe to S3", figures, note=_UPLOAD_NOTE)


def slowdown(state: State) -> Case:
    """A Python loop in the trainer, pinned to a core, while a checkpoint drains in the background.

    Beside it, in turns, the same with the daemon confined to the other cores: what is lost then is lost to
    the memory bus and to cores that share their units, whoever uses them.
    """
    core = max(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as folder:
        home = environment(FOREBAY_HOME=f"{folder}/home", FOREBAY_CHECKPOINT__KEEP_LOCAL="100")
        with home, running_daemon("checkpoint", {}) as daemon, Checkpointer("bench") as checkpoints:
            checkpoints.prepare(state, wait=True)
            checkpoints.save(0, state).wait()
            numbers = itertools.count(1)

            def save(state: State, place: Path) -> Callable[[], object]:
                handle = checkpoints.save(next(numbers), state)
                return lambda: handle.wait("local")

            free, confined = [], []
            for _ in range(_ROUNDS):
                confine(daemon.pid, os.sched_getaffinity(0))
                free.append(_loss(partial(_begin, save, state, Path(folder)), core))
                confine(daemon.pid, os.sched_getaffinity(0) - {core})
                confined.append(_loss(partial(_begin, save, state, Path(folder)), core))
        theirs = {}
        for name, peer in (
            ("dcp.async_save", dcp_async_thread),
            ("dcp.async_save, process", dcp_async_process),
        ):
            place = Path(folder) / name.replace(" ", "-")
            place.mkdir()
            with one_process_group(place):
                begin = partial(_begin, peer, state, place)
                theirs[name] = {"loop_loss": statistics.median(_loss(begin, core) for _ in range(3))}
    figures = {
        "drain_slowdown": statistics.median(a - b for a, b in zip(free, confined, strict=True)),
        "loop_loss": statistics.median(free),
        "loop_loss_confined": statistics.median(confined),
    }
    note = "share of its speed that the loop loses; drain_slowdown: more than with the daemon on other cores"
    return Case("a loop beside the drain", figures, theirs, note)


def _begin(peer: Save, state: State, place: Path) -> Callable[[], bool]:
    """A peer's save; its end is waited for in a thread that sleeps."""
    finish = peer(state, place / str(time.monotonic_ns()))
    waiter = threading.Thread(target=finish)
    waiter.start()
    return lambda: not waiter.is_alive()


def _loss(begin: Callable[[], Callable[[], bool]], core: int) -> float:
    """1 - speed while it drains / speed in quiet."""
    quiet = _speed(lambda: False, _QUIET_S, core)
    finished = begin()
    lost = 1 - _speed(finished, _LONGEST_S, core) / quiet
    while not finished():
        time.sleep(0.05)
    return lost


def _speed(stop: Callable[[], bool], longest_s: float, core: int) -> float:
    """Turns per second of a loop that keeps one core busy, until `stop` (looked at twenty times a second)."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        turns, began_at = 0, time.perf_counter()
        look_at = began_at + 0.05
        while (now := time.perf_counter()) - began_at < longest_s:
            sum(range(1000))
            turns += 1
            if now >= look_at:
                if stop():
                    break
                look_at = now + 0.05
        return turns / (time.perf_counter() - began_at)
    finally:
        os.sched_setaffinity(0, everywhere)
