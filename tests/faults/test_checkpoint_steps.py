"""C2, C3, C6, C7: a daemon that dies, or whose disk fails or is full, at each named step of a save."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from forebay.checkpointd import Checkpointer
from forebay.checkpointd.layout import Commit
from forebay.core.errors import DaemonUnavailable, ForebayError, SaveFailed
from forebay.core.failpoint import CHECKPOINT_POINTS, VARIABLE
from forebay.tiers.digest import digest_file
from tests.conftest import Node, eventually

LANDING = ("landing.begun", "landing.written", "landing.verified", "landing.noted", "landing.renamed")
# Before the journal says `local` a snapshot is only in the daemon's memory, and dies with it.
IN_MEMORY = ("absorb.noted", "spool.filed", "spool.manifested", *LANDING)
# Parts are sent to S3 alone: tests/integration/test_multipart.py.
POINTS = [point for point in (*LANDING, *CHECKPOINT_POINTS) if point != "multipart.sent"]
# Where an error of the disk can come from.
IO = [point for point in POINTS if point != "retention.uncommitted"]


@pytest.fixture
def upstream(node: Node, tmp_path: Path) -> str:
    node.set(FOREBAY_CHECKPOINT__KEEP_LOCAL="1")
    return str(tmp_path / "up")


def state(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((400_000,), float(value)), "b": torch.full((3,), value)}


def value_of(found: dict[str, torch.Tensor]) -> int:
    (value,) = found["w"].unique().tolist()
    assert found["b"].tolist() == [value] * 3
    return int(value)


def every_commit_is_whole(node: Node, upstream: str) -> bool:
    """C3: whatever COMMIT.json vouches for is there, on either tier, in every byte."""
    for root in (Path(upstream), node.settings.spool_dir / "runs"):
        for path in root.rglob("COMMIT.json"):
            for file in msgspec.json.decode(path.read_bytes(), type=Commit).files:
                assert digest_file(path.with_name(file.name)) == file.digest, path
    return True


@pytest.mark.parametrize("point", POINTS)
def test_kill_9_at_each_step(node: Node, upstream: str, point: str):
    """Step 1 is committed before. Step 2 is, after a restart, either committed or reported as lost."""
    node.start("checkpoint")
    trainer = Checkpointer("run", upstream=upstream)
    trainer.save(1, state(1)).wait()
    node.kill("checkpoint")
    node.set(**{VARIABLE: f"{point}=kill@1"})
    daemon = node.start("checkpoint")
    handle = None
    try:
        handle = trainer.save(2, state(2))
    except DaemonUnavailable:
        assert point == "absorb.noted"
    assert daemon.wait(timeout=20) == -9
    assert every_commit_is_whole(node, upstream)

    node.set(**{VARIABLE: ""})
    node.start("checkpoint")
    if point in IN_MEMORY:
        with pytest.raises(SaveFailed, match="no further: checkpointd ended before the snapshot was on disk"):
            if handle is None:
                raise SaveFailed("no further: checkpointd ended before the snapshot was on disk")
            handle.wait()
        assert trainer.latest().step == 1  # type: ignore[union-attr]
    else:
        assert handle is not None
        assert handle.wait(timeout_s=30).level == "committed"
        assert value_of(trainer.restore()[1]) == 2
    fresh = Checkpointer("run", upstream=upstream)
    fresh.save(3, state(3)).wait()
    fresh.close()
    step, found = fresh.restore()
    assert (step, value_of(found)) == (3, 3)
    assert every_commit_is_whole(node, upstream)
    assert eventually(lambda: not node.spool_temporaries())


@pytest.mark.parametrize("fault", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("point", IO)
def test_a_full_or_failing_disk_is_said_and_the_next_save_works(
    node: Node, upstream: str, point: str, fault: str
):
    """C6, C7: the save fails by name or gets over it; nothing half-visible; the daemon lives on."""
    node.set(**{VARIABLE: f"{point}=error:{fault}@1"})
    node.start("checkpoint")
    trainer = Checkpointer("run", upstream=upstream)
    try:
        level = trainer.save(1, state(1)).wait(timeout_s=30).level
        assert level == "committed"
    except ForebayError as err:
        assert isinstance(err, SaveFailed) or point == "absorb.noted"
        assert "space" in str(err) or "Input/output" in str(err), err
    assert every_commit_is_whole(node, upstream)
    fresh = Checkpointer("run", upstream=upstream)
    fresh.save(2, state(2)).wait()
    fresh.close()
    step, found = fresh.restore()
    assert (step, value_of(found)) == (2, 2)
    assert eventually(lambda: not node.spool_temporaries())


@pytest.mark.parametrize("point", POINTS)
def test_a_slow_step_delays_and_no_more(node: Node, upstream: str, point: str):
    node.set(**{VARIABLE: f"{point}=delay:0.5@1"})
    node.start("checkpoint")
    trainer = Checkpointer("run", upstream=upstream)
    for step in (1, 2, 3):
        trainer.save(step, state(step))
    trainer.wait()
    assert value_of(trainer.restore()[1]) == 3
    assert every_commit_is_whole(node, upstream)


@pytest.mark.parametrize("both", [False, True], ids=["the trainer", "trainer and daemon"])
def test_kill_9_of_the_trainer_or_both_after_local(node: Node, upstream: str, both: bool, tmp_path: Path):
    """C2: what was `local` survives both, what was absorbed survives the trainer."""
    import subprocess
    import sys

    script = (
        "import os, signal, sys, torch\n"
        "from forebay.checkpointd import Checkpointer\n"
        "from tests.faults.test_checkpoint_steps import state\n"
        "handle = Checkpointer('run', upstream=sys.argv[1]).save(5, state(5))\n"
        "handle.wait('local') if sys.argv[2] == 'True' else None\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    node.set(**{VARIABLE: "upload.put=delay:2@1"})
    node.start("checkpoint")
    run = subprocess.run([sys.executable, "-c", script, upstream, str(both)], check=False, timeout=60)
    assert run.returncode == -9
    if both:
        node.kill("checkpoint")
        node.set(**{VARIABLE: ""})
        node.start("checkpoint")
    trainer = Checkpointer("run", upstream=upstream)
    assert eventually(lambda: trainer.latest() is not None)
    step, found = trainer.restore()
    assert (step, value_of(found)) == (5, 5)
