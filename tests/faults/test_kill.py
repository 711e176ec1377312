"""kill -9 of each process at random points, twenty times, under one job that must come out right."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.benchmarks.seaweed import S3Server
from forebay.loaders import DataLoader, StagedDataset
from tests.conftest import Node

ROUNDS = 20
SHARDS = [30, 3, 55, 20, 41, 8, 33, 27, 60, 12]
STEPS_A_ROUND = 40

TRAINER = """
import hashlib, json, sys
import torch
from forebay.checkpointd import Checkpointer
from forebay.core.errors import NoCheckpoint
from forebay.loaders import DataLoader, StagedDataset

url, upstream, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
loader = DataLoader(StagedDataset(url, fields=("__key__",)), 8, shuffle=True, seed=2, shuffle_block=2)
checkpoints = Checkpointer("job", upstream=upstream)
step = 0
try:
    step, state = checkpoints.restore()
    assert state["w"].unique().tolist() == [float(step)], "the state is not the one of its step"
    loader.load_state_dict(state["loader"])
except NoCheckpoint:
    pass
print(json.dumps({"resumed": step}), flush=True)
last = step + steps
while step < last:
    for (keys,) in loader:
        step += 1
        digest = hashlib.sha256("".join(keys).encode()).hexdigest()
        print(json.dumps({"step": step, "digest": digest}), flush=True)
        if step % 5 == 0:
            checkpoints.save(step, {"w": torch.full((20_000,), float(step)), "loader": loader.state_dict()})
        if step == last:
            break
checkpoints.wait(timeout_s=60)
"""


def expected_digests(url: str, steps: int) -> dict[int, str]:
    """Step -> digest of an undisturbed job."""
    loader = DataLoader(StagedDataset(url, fields=("__key__",)), 8, shuffle=True, seed=2, shuffle_block=2)
    found: dict[int, str] = {}
    while len(found) < steps:
        for (keys,) in loader:
            found[len(found) + 1] = hashlib.sha256("".join(keys).encode()).hexdigest()
    return found


def lines(output: str) -> list[dict[str, object]]:
    whole = output.rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


@pytest.mark.parametrize(
    "victims", [("trainer",), ("stager",), ("checkpoint",), ("trainer", "stager", "checkpoint")]
)
def test_twenty_kills_change_nothing(
    node: Node,
    s3: S3Server,
    make_dataset: Callable[[list[int], int], str],
    prefix: str,
    victims: tuple[str, ...],
):
    """S3, C2, C3, C4, L4, F3: after each kill the job goes on from a committed step, exactly."""
    noise = random.Random("".join(victims))
    url = make_dataset(SHARDS, 1000)
    node.set(FOREBAY_STAGER__CAPACITY="600KB", FOREBAY_STAGER__WAIT_S="30")
    for part in ("stager", "checkpoint"):
        node.start(part)
    expected = expected_digests(url, ROUNDS * STEPS_A_ROUND + 50)
    resumed_from = 0
    for _ in range(ROUNDS):
        command = [sys.executable, "-c", TRAINER, url, s3.url(f"{prefix}/ckpt"), str(STEPS_A_ROUND)]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        killed = threading.Event()

        def kill(trainer: subprocess.Popen[str] = trainer, killed: threading.Event = killed) -> None:
            for victim in victims:
                if victim == "trainer":
                    trainer.kill()
                else:
                    node.kill(victim)
            killed.set()

        assert trainer.stdout is not None and trainer.stderr is not None
        # However long it takes to start here, it is at work when it is hit.
        first = trainer.stdout.readline()
        timer = threading.Timer(noise.uniform(0.0, 2.0), kill)
        timer.start()
        killed.wait(30)
        for part in victims:
            if part != "trainer":
                node.start(part)
        output, errors = trainer.communicate(timeout=120)
        timer.join()
        found = lines(first + output)
        # A trainer may fail when checkpointd is away at its save; it may never do something wrong.
        assert "AssertionError" not in errors and "Corrupt" not in errors, errors
        for line in found:
            if "resumed" in line:
                assert int(str(line["resumed"])) >= resumed_from, "a committed checkpoint was lost"
                resumed_from = int(str(line["resumed"]))
            else:
                assert line["digest"] == expected[int(str(line["step"]))], line
    for path in [*node.objects.rglob("*"), *Path(node.settings.spool_dir).rglob("*")]:
        assert not path.name.endswith(".damaged"), path
    final = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    resumed = int(str(lines(final.stdout)[0]["resumed"]))
    assert resumed >= resumed_from and resumed > 0
