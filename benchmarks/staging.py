"""`forebay bench staging`: cold to hot through stagerd, beside other clients on the same objects."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import obstore

from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.jobs import register, run_job
from forebay.benchmarks.peers.staging import PEERS, Took, measure
from forebay.benchmarks.report import Case, Report
from forebay.benchmarks.seaweed import S3Server, running_server
from forebay.benchmarks.settings import environment
from forebay.core.channel import Channel
from forebay.core.config import Settings
from forebay.core.errors import ForebayError
from forebay.core.protocol import Register, Stage

_ROUNDS = 4
# Those far behind are run less often: their median matters less than everybody's patience.
_SLOW_ROUNDS = 1
_FAST = ("s5cmd", "rclone", "obstore")


@dataclass(frozen=True)
class Load:
    objects: int
    object_bytes: int

    @property
    def name(self) -> str:
        kib = self.object_bytes >> 10
        return f"{self.objects} x {f'{kib >> 10} MiB' if kib >= 1024 else f'{kib} KiB'}"

    @property
    def total_bytes(self) -> int:
        return self.objects * self.object_bytes


LOADS = (Load(4, 256 << 20), Load(128, 4 << 20), Load(4000, 64 << 10))


def bench(loads: tuple[Load, ...], peers: tuple[str, ...], seed: int) -> Report:
    """In turns, into empty directories on one disk; medians. Ours checks every MD5 and keeps a catalog."""
    with (
        running_server() as server,
        environment(**server.env),
        tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as name,
    ):
        cases = [_case(server, load, peers, Path(name), seed) for load in loads]
    headline = next((case for case in cases if case.case == "128 x 4 MiB"), cases[0])
    figures = {
        "forebay_mb_per_s": headline.figures["forebay_mb_per_s"],
        "s5cmd_mb_per_s": headline.peers.get("s5cmd", {}).get("mb_per_s", 0.0),
        "ratio": headline.figures["forebay_mb_per_s"] / headline.peers["s5cmd"]["mb_per_s"],
        "ratio_vs_best": min(case.figures["ratio_vs_best"] for case in cases),
    }
    return Report("staging", figures, cases, seed)


def _case(server: S3Server, load: Load, peers: tuple[str, ...], folder: Path, seed: int) -> Case:
    prefix = f"staging-{load.objects}"
    _fill(server, prefix, load, seed)
    took: dict[str, list[Took]] = {name: [] for name in ("forebay", *peers)}
    # The first round finds a server that has just taken the objects in.
    for number in range(_ROUNDS + 1):
        for name in peers:
            if number <= _SLOW_ROUNDS or name in _FAST:
                _level(folder, load)
                target = folder / "peer"
                target.mkdir()
                took[name].append(measure(name, server.bucket, prefix, target))
        took["forebay"].append(_forebay(server, prefix, load, folder))
    medians = {name: _median(runs[1:], load) for name, runs in took.items()}
    mine = medians.pop("forebay")
    best = max(peer["mb_per_s"] for peer in medians.values())
    figures = {
        "forebay_mb_per_s": mine["mb_per_s"],
        "forebay_cpu_s_per_gb": mine["cpu_s_per_gb"],
        "best_mb_per_s": best,
        "ratio_vs_best": mine["mb_per_s"] / best,
    }
    return Case(load.name, figures, medians, "ours checks the MD5 of each object against its ETag")


def _median(runs: list[Took], load: Load) -> dict[str, float]:
    return {
        "mb_per_s": load.total_bytes / 1e6 / statistics.median(run.wall_s for run in runs),
        "cpu_s_per_gb": statistics.median(run.cpu_s for run in runs) / (load.total_bytes / 1e9),
    }


def _forebay(server: S3Server, prefix: str, load: Load, folder: Path) -> Took:
    _level(folder, load)
    home = folder / "home"
    with environment(FOREBAY_HOME=str(home)), running_daemon("stager", {}) as daemon:
        _level(folder, load, keep=home)
        began_at, cpu_s = time.perf_counter(), _cpu_s(daemon.pid)
        _stage(server.url(prefix), load.objects)
        return Took(time.perf_counter() - began_at, _cpu_s(daemon.pid) - cpu_s)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _level(folder: Path, load: Load, keep: Path | None = None) -> None:
    """Each run starts alike: the other's output gone, nothing left to write back, free memory touched.

    On a virtual machine a page that the host has not backed yet costs ten times a warm one, and which
    of two runs meets such pages is chance.
    """
    for path in folder.iterdir():
        if path != keep:
            shutil.rmtree(path)
    os.sync()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, min(3 * load.total_bytes, 2 << 30), flags=flags).close()


def _fill(server: S3Server, prefix: str, load: Load, seed: int) -> None:
    noise = random.Random(seed)
    for number in range(load.objects):
        body = noise.randbytes(min(load.object_bytes, 16 << 20)) * -(-load.object_bytes // (16 << 20))
        obstore.put(server.store(), f"{prefix}/{number:05d}", body[: load.object_bytes], use_multipart=False)


def _stage(url: str, objects: int) -> None:
    """From nothing known to everything staged: listing and job included."""
    with Channel.connect(Settings.load().stager_socket, "bench") as channel:
        job = run_job(channel, Stage(register(channel, Register(url, "raw")).id))
    if job.state != "done" or job.shards_done != objects:
        raise ForebayError(f"{job.shards_done} of {objects} objects were staged: {job.failed}")


def chosen(peers: list[str] | None) -> tuple[str, ...]:
    """Raises ForebayError for a name that nobody has."""
    unknown = sorted(set(peers or ()) - set(PEERS))
    if unknown:
        raise ForebayError(f"no peer {', '.join(unknown)}", hint=f"one of {', '.join(PEERS)}")
    return tuple(peers or PEERS)
