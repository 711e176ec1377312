"""The story: train, kill -9, restart, resume, finish; then compare with an undisturbed run."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import obstore

from forebay.benchmarks.demo.digits import upload_shards
from forebay.benchmarks.demo.job import Job, Outcome, Result, read_log
from forebay.benchmarks.demo.proof import Logs, before, blocked_ms_p50, global_batches, lost_and_repeated
from forebay.benchmarks.seaweed import S3Server, free_ports, running_server
from forebay.benchmarks.settings import environment
from forebay.core.channel import ask
from forebay.core.config import Settings
from forebay.core.errors import DaemonUnavailable, ForebayError, NoCheckpoint
from forebay.core.protocol import (
    Checkpoint,
    Checkpoints,
    CheckpointStatus,
    GetStatus,
    ListCheckpoints,
    StagerStatus,
)
from forebay.core.units import format_bytes

RANKS = 2
EPOCHS = 8
CHECKPOINT_EVERY = 10
SEED = 7
SHUFFLE_BLOCK = 3
# The job is killed in the middle of an epoch of 24 steps, shortly after a checkpoint.
KILL_AT_STEP = 87
CAPACITY_OF_DATASET = 0.55
_TRAIN_S = 300.0
_RESTART_S = 30.0


Say = Callable[[str], None]


def run(folder: Path, say: Say) -> Outcome:
    """Everything in `folder`. Raises ForebayError when the story itself breaks down."""
    began_at = time.monotonic()
    with ExitStack() as stack:
        say("starting SeaweedFS, a real S3 server")
        server = stack.enter_context(running_server())
        dataset_bytes = upload_shards(server.store(), "digits", SEED)
        capacity_bytes = int(dataset_bytes * CAPACITY_OF_DATASET)
        sizes = format_bytes(dataset_bytes), format_bytes(capacity_bytes)
        say(f"uploaded the digits, {sizes[0]}; the hot tier holds {sizes[1]}")
        stack.enter_context(environment(**server.env, **_settings(folder, capacity_bytes)))
        stack.enter_context(_forebay_up(folder / "forebay.log"))

        job = _job(server, folder, "demo")
        say(f"training on {RANKS} ranks; one of them will be killed at step {KILL_AT_STEP}")
        killed_at = _train_and_kill(job)
        counted = _status()
        first = _logs(job)
        say(f"killed a rank at step {killed_at}; now checkpointd and stagerd, with SIGKILL too")
        _kill_daemons(counted)
        say("`forebay up` has started them again; resuming from the newest committed checkpoint")
        second_start = msgspec.structs.replace(job, folder=str(_made(folder / "second")), progress=None)
        result = _train(second_start)
        after = _status()
        second = _logs(second_start)
        say(f"resumed from step {result.resumed_from_step}, finished at {result.steps}")
        checkpoints = _checkpoints(job)
        readable = _stock_reads(server, checkpoints[0], result, folder / "stock")
        say("training once more without any disturbance, to compare")
        reference_job = _job(server, folder, "reference")
        _train(reference_job)
        reference = _logs(reference_job)

    kept = before(first, result.resumed_from_step)
    lost, repeated = lost_and_repeated(kept, second, reference)
    theirs = global_batches(reference)
    mine = global_batches(second)
    return Outcome(
        accuracy=result.accuracy,
        epochs=EPOCHS,
        steps=result.steps,
        ranks=RANKS,
        dataset_bytes=dataset_bytes,
        hot_capacity_bytes=capacity_bytes,
        cold_bytes_fetched=counted.fetched_cold_bytes + after.fetched_cold_bytes,
        fetches=counted.fetches + after.fetches,
        evictions=counted.evictions + after.evictions,
        killed_at_step=killed_at,
        resumed_from_step=result.resumed_from_step,
        batches_identical_to_uninterrupted_run=bool(mine)
        and mine == {step: theirs.get(step) for step in mine}
        and max(mine) == max(theirs),
        samples_lost=lost,
        samples_repeated=repeated,
        checkpoint_blocked_ms_p50=blocked_ms_p50([*first, *second]),
        checkpoints_committed=len(checkpoints),
        stock_torch_can_read=readable,
        wall_s=time.monotonic() - began_at,
    )


def _settings(folder: Path, capacity_bytes: int) -> dict[str, str]:
    return {
        "FOREBAY_HOME": str(folder / "home"),
        "FOREBAY_STAGER__CAPACITY": str(capacity_bytes),
        "FOREBAY_API__PORT": str(free_ports(1)[0]),
    }


def _job(server: S3Server, folder: Path, run: str) -> Job:
    return Job(
        run=run,
        dataset=server.url("digits"),
        upstream=server.url("checkpoints"),
        epochs=EPOCHS,
        batch_size=32,
        checkpoint_every=CHECKPOINT_EVERY,
        shuffle_block=SHUFFLE_BLOCK,
        seed=SEED,
        folder=str(_made(folder / run)),
    )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


@contextmanager
def _forebay_up(log: Path) -> Iterator[None]:
    """The three daemons, as a user starts them; up when the API answers for both others."""
    with log.open("wb") as stderr:
        process = subprocess.Popen([sys.executable, "-m", "forebay.api.cli", "up"], stderr=stderr)
        try:
            _wait_for_daemons()
            yield
        finally:
            process.terminate()
            process.wait(timeout=30)


def _status() -> StagerStatus:
    return ask(Settings.load().stager_socket, GetStatus(), expect=StagerStatus)


def _wait_for_daemons() -> None:
    """Restarting belongs to `forebay up`; here one only asks, for a bounded time."""
    settings = Settings.load()
    deadline = time.monotonic() + _RESTART_S
    while True:
        try:
            _status()
            ask(settings.checkpoint_socket, GetStatus(), expect=CheckpointStatus)
            return
        except DaemonUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _torchrun(job: Job) -> subprocess.Popen[bytes]:
    config = Path(job.folder, "job.json")
    config.write_bytes(msgspec.json.encode(job))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_ports(1)[0]}", "--monitor-interval=0.1"]
    command += ["-m", "forebay.benchmarks.demo.train", str(config)]
    with job.output.open("wb") as output:
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=output
        )


def _train(job: Job) -> Result:
    process = _torchrun(job)
    try:
        status = process.wait(timeout=_TRAIN_S)
    finally:
        process.kill()
    if status:
        raise ForebayError(f"training failed with status {status}: {_tail(job)}")
    return msgspec.json.decode(job.result.read_bytes(), type=Result)


def _train_and_kill(job: Job) -> int:
    """Kill the last rank when it has done that step, wait for torchrun to notice; the step it was in."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as progress:
        address = str(Path(job.folder, "progress"))
        progress.bind(address)
        process = _torchrun(msgspec.structs.replace(job, progress=address))
        ended = os.pidfd_open(process.pid)
        step, pid = 0, 0
        try:
            while step < KILL_AT_STEP:
                heard, _, _ = select.select([progress.fileno(), ended], [], [], _TRAIN_S)
                if progress.fileno() not in heard:
                    raise ForebayError(f"training did not reach step {KILL_AT_STEP}: {_tail(job)}")
                step, pid = map(int, progress.recv(64).split())
            os.kill(pid, signal.SIGKILL)
            if process.wait(timeout=60) == 0:
                raise ForebayError("torchrun did not notice that a rank was killed")
        finally:
            os.close(ended)
            process.kill()
    return step


def _kill_daemons(stager: StagerStatus) -> None:
    settings = Settings.load()
    checkpoint = ask(settings.checkpoint_socket, GetStatus(), expect=CheckpointStatus)
    os.kill(checkpoint.pid, signal.SIGKILL)
    os.kill(stager.pid, signal.SIGKILL)
    _wait_for_daemons()


def _logs(job: Job) -> Logs:
    return [read_log(job.log(rank)) for rank in range(RANKS)]


def _tail(job: Job) -> str:
    return job.output.read_text(errors="replace")[-3000:]


def _checkpoints(job: Job) -> list[Checkpoint]:
    request = ListCheckpoints(job.run, job.upstream)
    found = ask(Settings.load().checkpoint_socket, request, expect=Checkpoints).checkpoints
    good = [c for c in found if c.problem is None and "upstream" in c.tiers]
    if not good:
        raise NoCheckpoint(f"nothing was committed under {job.upstream}")
    return good


def _stock_reads(server: S3Server, checkpoint: Checkpoint, result: Result, folder: Path) -> bool:
    """Download with obstore alone, read in a process that has no Forebay, compare the weights."""
    prefix = f"checkpoints/{checkpoint.run}/step-{checkpoint.step:09d}/{checkpoint.attempt}"
    folder.mkdir()
    store = server.store()
    for info in obstore.list(store, prefix).collect():
        data = obstore.get(store, info["path"]).bytes()
        (folder / info["path"].rpartition("/")[2]).write_bytes(data)
    import torch

    site_packages = str(Path(torch.__file__).parents[1])
    script = str(Path(__file__).with_name("stock.py"))
    command = [sys.executable, "-S", script, site_packages, str(folder)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    return run.returncode == 0 and run.stdout.strip() == result.weights_digest
