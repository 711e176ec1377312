"""Checkpoints through a real checkpointd to a real S3 server: C1 to C9 and their reports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest
import torch
import torch.distributed.checkpoint as dcp

from forebay.benchmarks.seaweed import S3Server, free_ports
from forebay.checkpointd import Checkpointer, ForebayReader, ForebayWriter
from forebay.checkpointd.layout import Commit
from forebay.core.channel import Channel, ask
from forebay.core.errors import (
    CheckpointCorrupt,
    DaemonUnavailable,
    InvalidRequest,
    NoCheckpoint,
    SaveFailed,
    UnsupportedValue,
    WaitTimeout,
)
from forebay.core.protocol import Absorb, Absorbed, Checkpoints, VerifyCheckpoints
from tests.conftest import Node, eventually, stats_below


def state_of(value: float, size: int = 1000) -> dict[str, Any]:
    return {"w": torch.full((size,), value), "step": value, "nested": {1: [torch.tensor(value), "text"]}}


def value_in(state: Any) -> float:
    assert float(state["nested"][1][0]) == state["step"] and state["w"].unique().tolist() == [state["step"]]
    return float(state["step"])


@pytest.fixture
def upstream(s3: S3Server, prefix: str) -> str:
    return s3.url(f"{prefix}/ckpt")


def objects(s3: S3Server, prefix: str) -> dict[str, int]:
    found = obstore.list(s3.store(), f"{prefix}/ckpt").collect()
    return {info["path"].split("ckpt/")[1]: info["size"] for info in found}


def commits(s3: S3Server, prefix: str) -> list[str]:
    return sorted(key for key in objects(s3, prefix) if key.endswith("COMMIT.json"))


@pytest.fixture
def daemon(node: Node, s3: S3Server) -> Iterator[Node]:
    node.start("checkpoint")
    yield node


def test_what_save_saw_is_what_is_saved(daemon: Node, upstream: str):
    """C1 and F10: changes in place and by replacement, right after save returned."""
    checkpoints = Checkpointer("run", upstream=upstream)
    state = state_of(1.0, 1_000_000)
    for step in range(1, 6):
        checkpoints.save(step, state)
        state["w"].fill_(99.0)
        state["nested"][1][0] = torch.tensor(99.0)
        checkpoints.wait()
        found_step, found = checkpoints.restore()
        assert found_step == step and value_in(found) == float(step)
        state["w"].fill_(step + 1.0)
        state["nested"][1][0].fill_(step + 1.0)
        state["step"] = step + 1.0


def test_levels_come_in_order_and_the_commit_is_last(daemon: Node, upstream: str, s3: S3Server, prefix: str):
    """C3: everything that COMMIT.json names is there, whole, before it is."""
    status = Checkpointer("run", upstream=upstream).save(100, state_of(1.0)).wait()
    assert status.level == "committed"
    times = [status.absorbed_at, status.local_at, status.durable_at, status.committed_at]
    assert times == sorted(times)  # type: ignore[type-var]
    there = objects(s3, prefix)
    folder = f"run/step-000000100/{status.attempt}"
    assert sorted(there) == [
        f"{folder}/COMMIT.json", f"{folder}/rank-00000.manifest.json", f"{folder}/rank-00000.safetensors",
    ]  # fmt: skip
    data = bytes(obstore.get(s3.store(), f"{prefix}/ckpt/{folder}/COMMIT.json").bytes())
    commit = msgspec.json.decode(data, type=Commit)
    assert [(f.name, f.size_bytes) for f in commit.files] == [
        ("rank-00000.safetensors", there[f"{folder}/rank-00000.safetensors"])
    ]
    assert (daemon.settings.spool_dir / "runs" / folder / "COMMIT.json").read_bytes() == data


def test_visible_only_when_every_rank_is_there(daemon: Node, upstream: str, s3: S3Server, prefix: str):
    """C3 and F11."""
    ranks = [
        Checkpointer("run", upstream=upstream, rank=rank, world_size=3, session="one") for rank in range(3)
    ]
    first = [rank.save(1, state_of(1.0)) for rank in ranks[:2]]
    for handle in first:
        assert handle.wait("durable").level == "durable"
    with pytest.raises(WaitTimeout, match="is durable, not yet committed"):
        first[0].wait("committed", timeout_s=0.5)
    assert ranks[0].latest() is None and not commits(s3, prefix)
    with pytest.raises(NoCheckpoint):
        ranks[0].restore()
    ranks[2].save(1, state_of(1.0)).wait()
    for handle in first:
        assert handle.wait().level == "committed"
    assert len(commits(s3, prefix)) == 1
    found = ranks[1].latest()
    assert found and (found.step, found.world_size, found.files) == (1, 3, 3)
    assert ranks[2].restore()[0] == 1


def test_an_attempt_of_a_dead_session_is_never_mixed_with_a_new_one(
    daemon: Node, upstream: str, s3: S3Server, prefix: str
):
    """C3 and F34: the same step again, after a crash that left half an attempt."""
    Checkpointer("run", upstream=upstream, rank=0, world_size=2, session="dead").save(5, state_of(1.0)).wait(
        "durable"
    )
    new = [Checkpointer("run", upstream=upstream, rank=r, world_size=2, session="new") for r in range(2)]
    handles = [rank.save(5, state_of(2.0)) for rank in new]
    for handle in handles:
        handle.wait()
    assert [key.split("/")[2] for key in commits(s3, prefix)] == ["new-000001"]
    assert [value_in(rank.restore()[1]) for rank in new] == [2.0, 2.0]


def test_a_damaged_file_is_taken_from_the_next_tier(daemon: Node, upstream: str):
    """C4 and F40: a flipped bit in the spool; upstream has it right."""
    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(1, state_of(1.0)).wait()
    checkpoints.close()
    (file,) = (daemon.settings.spool_dir / "runs").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    step, state = checkpoints.restore()
    assert (step, value_in(state)) == (1, 1.0)
    assert file.with_name(f"{file.name}.damaged").read_bytes() == data


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "no commit", "garbage commit"])
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(
    daemon: Node, upstream: str, s3: S3Server, prefix: str, damage: str, caplog: pytest.LogCaptureFixture
):
    """C4 and F11: damaged everywhere; the next older one is taken, and that is said."""
    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(9, state_of(9.0)).wait()
    attempt = checkpoints.save(10, state_of(10.0)).wait().attempt
    checkpoints.close()
    folder = f"run/step-000000010/{attempt}"
    local = daemon.settings.spool_dir / "runs" / folder
    for path in local.iterdir():
        path.unlink()
    key = f"{prefix}/ckpt/{folder}/" + ("COMMIT.json" if "commit" in damage else "rank-00000.safetensors")
    data = bytearray(obstore.get(s3.store(), key).bytes())
    if damage in ("gone", "no commit"):
        obstore.delete(s3.store(), key)
    else:
        data[-5] ^= 1
        wrong = data[: len(data) // 2] if damage == "cut" else b"{" if "commit" in damage else bytes(data)
        obstore.put(s3.store(), key, wrong, use_multipart=False)
    step, state = checkpoints.restore()
    assert (step, value_in(state)) == (9, 9.0)
    if damage != "no commit":
        assert "passed over: run step 10" in caplog.text
    if damage in ("cut", "gone"):
        latest = checkpoints.latest()
        assert latest and latest.step == 9


def test_leftovers_of_other_tools_and_crashes_are_no_checkpoints(
    daemon: Node, upstream: str, s3: S3Server, prefix: str
):
    """F11 and F38: empty files, names that sort wrong, a `latest` that points elsewhere."""
    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(9100, state_of(1.0)).wait()
    checkpoints.save(10000, state_of(2.0)).wait()
    for name in (
        "latest",
        "step-000020000/x/COMMIT.json",
        "step-000020000/x/rank-00000.safetensors",
        "step-99/tmp",
    ):
        obstore.put(s3.store(), f"{prefix}/ckpt/run/{name}", b"", use_multipart=False)
    latest = checkpoints.latest()
    assert latest and latest.step == 10000
    assert checkpoints.restore()[0] == 10000


def test_restore_on_a_new_machine_needs_only_upstream(
    daemon: Node, upstream: str, monkeypatch: pytest.MonkeyPatch
):
    Checkpointer("run", upstream=upstream).save(3, state_of(3.0)).wait()
    other = Node(daemon.home / "o", monkeypatch)
    other.home.mkdir()
    other.start("checkpoint")
    try:
        checkpoints = Checkpointer("run", upstream=upstream)
        assert value_in(checkpoints.restore()[1]) == 3.0
        found = checkpoints.latest()
        assert found and found.tiers == ["spool", "upstream"]
    finally:
        other.close()


def test_a_trainers_death_loses_nothing_absorbed(daemon: Node, upstream: str):
    """C2: SIGKILL right after save returned."""
    script = """
import os, signal, sys, torch
from forebay.checkpointd import Checkpointer
Checkpointer("run", upstream=sys.argv[1]).save(4, {"w": torch.full((5_000_000,), 4.0)})
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", script, upstream], check=False, timeout=60)
    assert run.returncode == -9
    checkpoints = Checkpointer("run", upstream=upstream)
    assert eventually(lambda: checkpoints.latest() is not None)
    step, state = checkpoints.restore()
    assert step == 4 and state["w"].unique().tolist() == [4.0]


def test_after_local_kill_9_of_the_daemon_loses_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch, s3: S3Server
):
    """C2 and F36: upstream is away, save does not wait for it; the upload goes on after a restart."""
    port = free_ports(1)[0]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    node.start("checkpoint")
    checkpoints = Checkpointer("run", upstream=s3.url("away"))
    handle = checkpoints.save(1, state_of(1.0))
    handle.wait("local", timeout_s=10)
    with pytest.raises(WaitTimeout, match="is local, not yet committed"):
        handle.wait("committed", timeout_s=0.5)
    node.kill("checkpoint")
    with pytest.raises(DaemonUnavailable):
        checkpoints.save(2, state_of(2.0))
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    node.start("checkpoint")
    assert handle.wait("committed", timeout_s=20).level == "committed"
    assert value_in(checkpoints.restore()[1]) == 1.0


def test_what_died_in_memory_is_reported_not_forgotten(daemon: Node, upstream: str):
    """C6: the daemon is killed before the snapshot is on disk; the next save says so."""
    import sqlite3

    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(1, state_of(1.0)).wait()
    with sqlite3.connect(daemon.settings.home / "checkpoint/journal.db") as db:
        db.execute("UPDATE attempts SET level='absorbed'")
    daemon.kill("checkpoint")
    daemon.start("checkpoint")
    with pytest.raises(SaveFailed, match="reached `absorbed` and no further: checkpointd ended before"):
        checkpoints.save(2, state_of(2.0))
    checkpoints.save(2, state_of(2.0)).wait()


def test_a_failure_after_save_is_reported_everywhere(daemon: Node, s3: S3Server):
    """C6 and F14: wrong credentials are found out after save returned."""
    daemon.kill("checkpoint")
    daemon.set(AWS_SECRET_ACCESS_KEY="wrong")
    daemon.start("checkpoint")
    for report in ("wait", "save", "close"):
        checkpoints = Checkpointer("run", upstream=s3.url("denied"))
        handle = checkpoints.save(1, state_of(1.0))
        assert eventually(lambda h=handle: h.status().error is not None)
        with pytest.raises(SaveFailed, match=r"reached `local` and no further: .*AWS_ACCESS_KEY_ID"):
            {
                "wait": handle.wait,
                "save": lambda c=checkpoints: c.save(2, state_of(2.0)),
                "close": checkpoints.close,
            }[report]()


def test_a_full_spool_fails_the_save_by_name(node: Node, s3: S3Server, upstream: str):
    """C7: a real small disk; nothing half-written stays, and the next save works when there is room."""
    spool = node.home / "small"
    spool.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(spool)], check=True)
    try:
        node.set(FOREBAY_CHECKPOINT__SPOOL_DIR=str(spool))
        node.start("checkpoint")
        checkpoints = Checkpointer("run", upstream=upstream)
        with pytest.raises(SaveFailed, match="no space left"):
            checkpoints.save(1, state_of(1.0, 1_000_000)).wait()
        assert not [p for p in spool.rglob("*") if p.suffix == ".safetensors" or "tmp" in p.name]
        Checkpointer("run", upstream=upstream).save(2, state_of(2.0, 1000)).wait()
    finally:
        node.kill("checkpoint")
        subprocess.run(["umount", str(spool)], check=True)


def test_two_daemons_that_commit_one_step_end_in_one_commit(
    daemon: Node, upstream: str, s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
):
    """Idea 5 of DESIGN: two nodes, one rank each, both try to commit."""
    first = Checkpointer("run", upstream=upstream, rank=0, world_size=2, session="x")
    other = Node(daemon.home / "o", monkeypatch)
    other.home.mkdir()
    other.start("checkpoint")
    try:
        second = Checkpointer("run", upstream=upstream, rank=1, world_size=2, session="x")
        handles = [first.save(1, state_of(1.0)), second.save(1, state_of(1.0))]
        for handle in handles:
            assert handle.wait(timeout_s=30).level == "committed"
        assert len(commits(s3, prefix)) == 1
    finally:
        other.close()


def test_the_spool_keeps_the_newest_and_never_what_is_not_ours(daemon: Node, upstream: str):
    """C5 and F13."""
    checkpoints = Checkpointer("run", upstream=upstream)
    stranger = daemon.settings.spool_dir / "runs/run/step-000000001/notes"
    for step in range(1, 6):
        handle = checkpoints.save(step, state_of(float(step)))
        handle.wait()
        if step == 1:
            stranger.mkdir()
            (stranger / "readme.txt").write_text("a user's")
    spool = daemon.settings.spool_dir / "runs/run"

    def kept() -> set[str]:
        return {p.parent.parent.name for p in stats_below(spool) if p.suffix == ".safetensors"}

    assert eventually(lambda: kept() == {"step-000000004", "step-000000005"})
    assert (stranger / "readme.txt").exists()
    assert checkpoints.restore(step=2)[0] == 2


def test_without_upstream_the_spool_is_where_it_commits(daemon: Node):
    checkpoints = Checkpointer("run")
    checkpoints.save(1, state_of(1.0)).wait()
    found = checkpoints.latest()
    assert found and found.tiers == ["spool"]
    assert value_in(checkpoints.restore()[1]) == 1.0


def test_verify_reads_every_byte(daemon: Node, upstream: str, s3: S3Server, prefix: str):
    checkpoints = Checkpointer("run", upstream=upstream)
    status = checkpoints.save(1, state_of(1.0)).wait()
    request = VerifyCheckpoints("run", upstream)
    socket = daemon.settings.checkpoint_socket
    assert [c.problem for c in ask(socket, request, expect=Checkpoints).checkpoints] == [None, None]
    key = f"{prefix}/ckpt/run/step-000000001/{status.attempt}/rank-00000.safetensors"
    data = bytearray(obstore.get(s3.store(), key).bytes())
    data[-1] ^= 1
    obstore.put(s3.store(), key, bytes(data), use_multipart=False)
    problems = {c.tiers[0]: c.problem for c in ask(socket, request, expect=Checkpoints).checkpoints}
    assert problems == {"spool": None, "upstream": "rank-00000.safetensors does not match its digest"}


def test_bad_requests_are_refused(daemon: Node, upstream: str):
    with pytest.raises(InvalidRequest, match="name for a run"):
        Checkpointer("../evil")
    with pytest.raises(InvalidRequest, match="session="):
        Checkpointer("run", rank=0, world_size=2)
    checkpoints = Checkpointer("run", upstream=upstream)
    with pytest.raises(UnsupportedValue, match="is a object"):
        checkpoints.save(1, {"x": object()})
    with pytest.raises(InvalidRequest, match="negative"):
        checkpoints.save(-1, state_of(1.0))
    with pytest.raises(NoCheckpoint, match="at step 77"):
        checkpoints.save(1, state_of(1.0)).wait()
        checkpoints.restore(step=77)
    with pytest.raises(NoCheckpoint, match="was saved by 1 ranks"):
        checkpoints.restore(rank=1)


def test_what_is_no_arena_is_not_absorbed(daemon: Node):
    fd = os.memfd_create("fake")
    os.ftruncate(fd, 10_000)
    with Channel.connect(daemon.settings.checkpoint_socket, "test") as channel:
        request = Absorb("run", 1, "a", 0, 1, 2, None)
        with pytest.raises(CheckpointCorrupt, match="not an arena"):
            channel.request(request, expect=Absorbed, fds=[fd])
    os.close(fd)


def test_saves_in_a_row_reuse_two_buffers(daemon: Node):
    checkpoints = Checkpointer("run")
    state = state_of(0.0, 500_000)
    checkpoints.prepare(state, wait=True)
    before = len(os.listdir("/proc/self/fd"))
    for step in range(12):
        state["w"].fill_(float(step))
        state["nested"][1][0].fill_(float(step))
        state["step"] = float(step)
        checkpoints.save(step, state)
    checkpoints.wait()
    assert value_in(checkpoints.restore()[1]) == 11.0
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_dcp_saves_and_loads(daemon: Node, upstream: str, tmp_path: Path):
    """dcp.save and dcp.load unchanged; and stock torch reads what is on disk."""
    model = torch.nn.Linear(4, 3)
    state = {"model": model.state_dict(), "lr": 0.1, "betas": (0.9, 0.99), "n": torch.tensor(3)}
    writer = ForebayWriter("run", upstream=upstream)
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(float(step))
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step))
    writer.wait()

    def empty() -> dict[str, Any]:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        return {"model": zeros, "lr": 0.0, "betas": (), "n": torch.tensor(0)}

    target = empty()
    dcp.load(target, storage_reader=ForebayReader("run", upstream=upstream))
    assert torch.equal(target["model"]["weight"], model.weight) and int(target["n"]) == 3
    assert (target["lr"], target["betas"]) == (0.1, (0.9, 0.99))
    dcp.load(target := empty(), storage_reader=ForebayReader("run", upstream=upstream), checkpoint_id="1")
    assert target["model"]["weight"].unique().tolist() == [1.0]


def test_runs_do_not_disturb_each_other(daemon: Node, upstream: str):
    def work(value: float) -> float:
        checkpoints = Checkpointer(f"run-{value:g}", upstream=upstream)
        for step in range(5):
            checkpoints.save(step, state_of(value))
        checkpoints.wait()
        return value_in(checkpoints.restore()[1])

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(work, [1.0, 2.0, 3.0])) == [1.0, 2.0, 3.0]
