"""`forebay bench staging`: cold to hot through stagerd, beside `s5cmd cp` of the same objects."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import obstore

from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.report import Case, Report
from forebay.benchmarks.seaweed import S3Server, running_server
from forebay.benchmarks.settings import environment
from forebay.core.channel import Channel, close_all
from forebay.core.config import Settings
from forebay.core.errors import ForebayError
from forebay.core.protocol import DatasetReply, JobReply, Register, Stage, WaitJob

_ROUNDS = 7


def bench(objects: int, object_bytes: int, seed: int) -> Report:
    """In turns, into empty directories on one disk; medians. Ours checks every MD5 and keeps a catalog."""
    with (
        running_server() as server,
        tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as name,
    ):
        folder = Path(name)
        _fill(server, objects, object_bytes, seed)
        ours, theirs = [], []
        for number in range(_ROUNDS + 1):
            _level(folder, objects * object_bytes)
            theirs.append(_timed(partial(_s5cmd, server, folder / f"s5cmd-{number}")))
            home = folder / f"home-{number}"
            variables = environment(**server.env, FOREBAY_HOME=str(home))
            with variables, running_daemon("stager", {}):
                _level(folder, objects * object_bytes, keep=home)
                ours.append(_timed(partial(_stage, server, objects)))
    megabytes = objects * object_bytes / 1e6
    # The first round finds a server that has just taken the objects in.
    mine, peer = megabytes / statistics.median(ours[1:]), megabytes / statistics.median(theirs[1:])
    figures = {"forebay_mb_per_s": mine, "s5cmd_mb_per_s": peer, "ratio": mine / peer}
    case = Case(
        f"{objects} x {object_bytes >> 20} MiB",
        figures,
        {"s5cmd": {"mb_per_s": peer}},
        "MD5 of each object checked",
    )
    return Report("staging", figures, [case], seed)


def _level(folder: Path, object_bytes: int, keep: Path | None = None) -> None:
    """Each run starts alike: the other's output gone, nothing left to write back, free memory touched.

    On a virtual machine a page that the host has not backed yet costs ten times a warm one, and which
    of two runs meets such pages is chance.
    """
    for path in folder.iterdir():
        if path != keep:
            shutil.rmtree(path)
    os.sync()
    mmap.mmap(-1, 3 * object_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def _fill(server: S3Server, objects: int, object_bytes: int, seed: int) -> None:
    noise = random.Random(seed)
    for number in range(objects):
        obstore.put(
            server.store(), f"staging/{number:05d}", noise.randbytes(object_bytes), use_multipart=False
        )


def _stage(server: S3Server, objects: int) -> None:
    """From nothing known to everything staged: listing and job included."""
    with Channel.connect(Settings.load().stager_socket, "bench") as channel:
        reply, fds = channel.request(Register(server.url("staging"), "raw"), expect=DatasetReply)
        close_all(fds)
        job = channel.request(Stage(reply.dataset.id), expect=JobReply)[0].job
        while job.state == "running":
            job = channel.request(WaitJob(job.id, job.version, 60.0), expect=JobReply, timeout_s=90)[0].job
    if job.state != "done" or job.shards_done != objects:
        raise ForebayError(f"{job.shards_done} of {objects} objects were staged: {job.failed}")


def _s5cmd(server: S3Server, target: Path) -> None:
    target.mkdir()
    command = [str(Path(sys.executable).with_name("s5cmd")), "--endpoint-url", server.endpoint]
    command += ["cp", server.url("staging/*"), f"{target}/"]
    subprocess.run(command, env={**os.environ, **server.env}, check=True, stdout=subprocess.DEVNULL)


def _timed(call: Callable[[], None]) -> float:
    began_at = time.perf_counter()
    call()
    return time.perf_counter() - began_at
