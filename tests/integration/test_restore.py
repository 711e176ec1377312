"""Restore from the nearest tier: memory, spool, upstream; into new tensors or the trainer's own (C4)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.benchmarks.seaweed import S3Server, free_ports
from forebay.checkpointd import Checkpointer
from forebay.core.errors import InvalidRequest, NoCheckpoint
from tests.conftest import Node, eventually


@pytest.fixture
def daemon(node: Node, s3: S3Server) -> Iterator[Node]:
    node.start("checkpoint")
    yield node


@pytest.fixture
def upstream(s3: S3Server, prefix: str) -> str:
    return s3.url(f"{prefix}/ckpt")


def state_of(value: float) -> dict[str, Any]:
    """Every shape and kind that is read differently: large, tiny, empty, scalar, not 4 bytes wide."""
    return {
        "large": torch.full((3_000_000,), value),
        "half": torch.full((70, 30), value, dtype=torch.bfloat16),
        "eight": torch.full((11,), value).to(torch.float8_e4m3fn),
        "complex": torch.full((7,), complex(value, -value)),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty((0, 5)),
        "scalar": torch.tensor(int(value)),
        "many": [torch.full((number + 1,), value, dtype=torch.float64) for number in range(700)],
        "step": value,
    }


def same(found: Any, value: float) -> bool:
    wanted = state_of(value)
    pairs = [(found[name], wanted[name]) for name in wanted if name not in ("many", "step")]
    pairs += list(zip(found["many"], wanted["many"], strict=True))
    return (
        found["step"] == value
        and all(
            a.dtype == b.dtype
            and a.shape == b.shape
            and bytes(a.reshape(-1).view(torch.uint8).tolist())
            == bytes(b.reshape(-1).view(torch.uint8).tolist())
            for a, b in pairs
            if a.numel() < 1_000_000
        )
        and torch.equal(found["large"], wanted["large"])
    )


def tiers(checkpoints: Checkpointer) -> list[str]:
    (file,) = checkpoints.preview().files
    return file.tiers


def damage(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def spooled(node: Node) -> Path:
    (path,) = (node.settings.spool_dir / "runs").rglob("*.safetensors")
    return path


def test_every_tier_gives_the_same_state(daemon: Node, upstream: str):
    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(1, state_of(3.0)).wait()
    assert tiers(checkpoints) == ["memory", "spool", "upstream"]
    assert same(checkpoints.restore()[1], 3.0)
    checkpoints.close()
    assert tiers(checkpoints) == ["spool", "upstream"]
    assert same(checkpoints.restore()[1], 3.0)
    spooled(daemon).unlink()
    assert tiers(checkpoints) == ["upstream"]
    assert same(checkpoints.restore()[1], 3.0)
    assert tiers(checkpoints) == ["spool", "upstream"]


def test_a_dead_trainers_last_save_is_restored_from_memory(daemon: Node, upstream: str):
    """SIGKILL: its arena outlives it; spool and upstream are not even looked into."""
    script = """
        import os, signal, sys, torch
        from forebay.checkpointd import Checkpointer
        from tests.integration.test_restore import state_of
        checkpoints = Checkpointer("run", upstream=sys.argv[1])
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(float(step))).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script), upstream], check=False, timeout=60)
    assert run.returncode == -9
    checkpoints = Checkpointer("run", upstream=upstream)
    assert tiers(checkpoints)[0] == "memory"
    for path in (daemon.settings.spool_dir / "runs").rglob("*.safetensors"):
        path.write_bytes(b"\0" * path.stat().st_size)
    step, state = checkpoints.restore()
    assert step == 3 and same(state, 3.0)
    # The one that comes after it takes its place.
    checkpoints.save(4, {"w": torch.ones(3)}).wait()
    assert checkpoints.restore(3)[0] == 3 and checkpoints.preview(3).files[0].tiers == ["spool", "upstream"]


def test_memory_is_given_back_when_nobody_comes(node: Node, s3: S3Server, upstream: str):
    node.set(FOREBAY_CHECKPOINT__KEEP_MEMORY_S="0.2")
    daemon = node.start("checkpoint")
    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(1, state_of(1.0)).wait()

    def arenas() -> int:
        found = 0
        for path in Path(f"/proc/{daemon.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found += "forebay-arena" in os.readlink(path)
        return found

    assert arenas() == 1
    channel = checkpoints._handover._channel
    assert channel
    channel.close()
    assert eventually(lambda: arenas() == 0)


def test_an_arena_that_is_used_again_is_not_taken_for_what_it_held(daemon: Node, upstream: str):
    checkpoints = Checkpointer("run", upstream=upstream, buffers=1)
    checkpoints.save(1, state_of(1.0)).wait()
    checkpoints.save(2, state_of(2.0)).wait()
    assert checkpoints.preview(1).files[0].tiers == ["spool", "upstream"]
    assert same(checkpoints.restore(1)[1], 1.0) and same(checkpoints.restore(2)[1], 2.0)


@pytest.mark.parametrize("at", [-5, 3, 40], ids=["data", "length", "header"])
def test_what_is_damaged_in_the_spool_is_read_from_upstream(daemon: Node, upstream: str, at: int):
    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(1, state_of(1.0)).wait()
    checkpoints.close()
    damage(spooled(daemon), at)
    assert same(checkpoints.restore()[1], 1.0)
    assert same(checkpoints.restore()[1], 1.0)


def test_memory_that_is_damaged_is_forgotten(daemon: Node, upstream: str):
    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(1, state_of(1.0)).wait()
    buffer = checkpoints._handover._buffers[0]
    assert buffer.bytes is not None and buffer.busy
    buffer.bytes[-9] += 1
    assert tiers(checkpoints)[0] == "memory"
    buffer.bytes[buffer.busy.status().size_bytes - 9] += 1
    assert same(checkpoints.restore()[1], 1.0)
    assert tiers(checkpoints)[0] == "spool"


def test_into_the_trainers_own_tensors(daemon: Node, upstream: str):
    """Filled where they are, whatever their layout; what is no tensor comes anew."""
    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(1, state_of(5.0)).wait()
    own = state_of(0.0)
    own["half"] = torch.zeros((30, 70), dtype=torch.bfloat16).t()
    places = {name: own[name].data_ptr() for name in ("large", "half", "scalar")}
    _, state = checkpoints.restore(into=own)
    assert same(state, 5.0) and {name: state[name].data_ptr() for name in places} == places
    assert state["large"] is own["large"] or torch.equal(own["large"], state["large"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"large": torch.zeros(5)}, r"large is torch.float32 \(5,\), saved was torch.float32 \(3000000,\)"),
        ({"scalar": torch.tensor(1.0)}, "scalar is torch.float32"),
        ({"new": torch.zeros(1)}, "new was not saved"),
        ({"flags": None}, "flags was saved, `into` lacks it"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(
    daemon: Node, upstream: str, change: dict[str, Any], said: str
):
    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(1, state_of(5.0)).wait()
    own = state_of(0.0) | change
    with pytest.raises(InvalidRequest, match=said):
        checkpoints.restore(into=own)
    assert float(own["half"][0, 0]) == 0.0
    _, state = checkpoints.restore(into=own, strict=False)
    assert float(own["half"][0, 0]) == 5.0 and float(state["scalar"]) == 5.0
    assert torch.equal(state["large"], torch.full((3_000_000,), 5.0)) and state["flags"].sum() == 2


RANK = """
    import os, sys, torch, torch.distributed as dist
    from forebay.checkpointd import Checkpointer
    from forebay.core.errors import NoCheckpoint
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=2)
    checkpoints = Checkpointer("run", upstream=sys.argv[2])
    if sys.argv[4] == "save":
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.full((1000,), 10.0 * step + rank)}).wait()
        checkpoints.close()
    else:
        try:
            step, state = checkpoints.restore()
            print(step, state["w"].unique().tolist())
        except NoCheckpoint as err:
            print("none", err)
    dist.barrier()
    dist.destroy_process_group()
"""


def run_ranks(upstream: str, folder: Path, what: str) -> list[str]:
    store = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RANK), str(rank), upstream, store, what],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    return said


def test_ranks_take_the_newest_checkpoint_that_each_of_them_can_read(
    daemon: Node, upstream: str, s3: S3Server, tmp_path: Path
):
    """One rank's file is damaged on every tier: both go back, none hangs, none goes on alone."""
    up = tmp_path / "up"
    run_ranks(str(up), tmp_path, "save")
    assert run_ranks(str(up), tmp_path, "restore") == ["2 [20.0]", "2 [21.0]"]
    for root in (up, daemon.settings.spool_dir / "runs"):
        for path in root.rglob("step-000000002/*/rank-00001.safetensors"):
            damage(path)
    assert run_ranks(str(up), tmp_path, "restore") == ["1 [10.0]", "1 [11.0]"]
    for root in (up, daemon.settings.spool_dir / "runs"):
        for path in root.rglob("step-000000001/*/rank-00001.safetensors"):
            damage(path)
    assert [said.split()[0] for said in run_ranks(str(up), tmp_path, "restore")] == ["none", "none"]


def test_a_spool_that_was_removed_under_the_daemon_is_no_trouble(daemon: Node, upstream: str):
    import shutil

    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(1, state_of(1.0)).wait()
    checkpoints.close()
    shutil.rmtree(daemon.settings.spool_dir / "runs")
    assert same(checkpoints.restore()[1], 1.0)


def test_nothing_to_restore_is_said(daemon: Node, upstream: str):
    with pytest.raises(NoCheckpoint, match="none was ever committed"):
        Checkpointer("run", upstream=upstream).restore()
