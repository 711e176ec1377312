"""What is kept, what is skipped, what is said, and what is brought to safety before the end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forebay.benchmarks.seaweed import S3Server, free_ports
from forebay.checkpointd import Checkpointer
from forebay.core.channel import ask
from forebay.core.errors import NoCheckpoint, SaveFailed, UnsupportedValue
from forebay.core.protocol import (
    Checkpoints,
    Done,
    Flush,
    Flushed,
    Keep,
    ListCheckpoints,
    PinCheckpoint,
    Prune,
)
from tests.conftest import Node, eventually

STATE = {"w": torch.ones(1000)}
# A disk that takes this long for each snapshot.
SLOW = "spool.filed=delay:1.5"


@pytest.fixture
def upstream(tmp_path: Path) -> str:
    return str(tmp_path / "up")


@pytest.fixture
def daemon(node: Node) -> Iterator[Node]:
    node.start("checkpoint")
    yield node


def steps_in(node: Node, upstream: str | None) -> list[int]:
    request = ListCheckpoints("run", upstream)
    found = ask(node.settings.checkpoint_socket, request, expect=Checkpoints).checkpoints
    tier = "upstream" if upstream else "spool"
    return [c.step for c in found if tier in c.tiers and not c.problem]


def save_all(checkpoints: Checkpointer, losses: dict[int, float]) -> None:
    for step, loss in losses.items():
        checkpoints.save(step, STATE, metrics={"loss": loss}, metadata={"epoch": step // 10}).wait()


def test_a_rule_is_kept_upstream_and_the_spool_by_its_own(daemon: Node, upstream: str):
    """C5: best by metric and newest; files of others, also beside ours, stay."""
    checkpoints = Checkpointer("run", upstream=upstream, keep=Keep(last=1, best=1, metric="loss"))
    save_all(checkpoints, {10: 0.2, 20: 0.9})
    stranger = next(Path(upstream).glob("run/step-000000020/*")) / "notes.txt"
    stranger.write_text("of somebody else")
    save_all(checkpoints, {30: 0.5, 40: 0.7})
    assert eventually(lambda: steps_in(daemon, upstream) == [40, 10])
    assert stranger.read_text() == "of somebody else"
    assert steps_in(daemon, None) == [40, 30]
    opened = checkpoints.preview(10)
    assert opened.checkpoint.metrics == {"loss": 0.2} and opened.metadata == {"epoch": 1}


def test_pins_and_dry_runs(daemon: Node, upstream: str):
    save_all(Checkpointer("run", upstream=upstream), {10: 0.2, 20: 0.9, 30: 0.5})
    socket = daemon.settings.checkpoint_socket
    ask(socket, PinCheckpoint("run", upstream, 10), expect=Done)
    would = ask(socket, Prune("run", upstream, Keep(last=1), dry_run=True), expect=Checkpoints)
    assert [c.step for c in would.checkpoints] == [20] and steps_in(daemon, upstream) == [30, 20, 10]
    ask(socket, Prune("run", upstream, Keep(last=1)), expect=Checkpoints)
    assert steps_in(daemon, upstream) == [30, 10]
    ask(socket, PinCheckpoint("run", upstream, 10, pinned=False), expect=Done)
    ask(socket, Prune("run", upstream, Keep(last=1)), expect=Checkpoints)
    assert steps_in(daemon, upstream) == [30]
    with pytest.raises(NoCheckpoint, match="at step 10"):
        ask(socket, PinCheckpoint("run", upstream, 10), expect=Done)


@pytest.mark.parametrize("policy", ["skip", "fail", "block"])
def test_when_the_disk_is_behind(node: Node, upstream: str, policy: str):
    """C7: back-pressure as asked for; what was absorbed is committed in any case."""
    node.set(FOREBAY_FAILPOINTS=SLOW)
    node.start("checkpoint")
    checkpoints = Checkpointer("run", upstream=upstream, buffers=1, policy=policy)  # type: ignore[arg-type]
    first = checkpoints.save(1, STATE)
    if policy == "skip":
        second = checkpoints.save(2, STATE)
        assert second.skipped
        with pytest.raises(SaveFailed, match="step 2 of run was skipped"):
            second.wait()
    elif policy == "fail":
        with pytest.raises(SaveFailed, match="step 2 of run was not saved: the snapshots before it"):
            checkpoints.save(2, STATE)
    else:
        second = checkpoints.save(2, STATE)
        assert first.status().level != "absorbed"
        second.wait()
    assert first.wait().level == "committed"
    checkpoints.save(3, STATE).wait()
    assert steps_in(node, upstream) == ([3, 2, 1] if policy == "block" else [3, 1])


def test_failures_are_warned_of_or_counted(daemon: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """C6: by default the next call raises; or the log says it; or only so many in a row raise."""
    place = tmp_path / "file"
    place.write_text("no directory")
    bad = str(place / "up")

    def saves(on_error: object) -> int:
        """How many saves went well before one raised."""
        checkpoints = Checkpointer("run", upstream=bad, on_error=on_error)  # type: ignore[arg-type]
        for number in range(5):
            try:
                handle = checkpoints.save(number, STATE)
            except SaveFailed:
                return number
            assert eventually(lambda h=handle: h.status().error is not None)
        return 5

    assert saves("raise") == 1
    assert saves("warn") == 5 and "no further" in caplog.text
    assert saves(3) == 3


@pytest.mark.parametrize("arena_bytes", ["1MiB", "1GiB"])
def test_the_same_tensors_under_another_step_are_said_once(
    node: Node, upstream: str, caplog: pytest.LogCaptureFixture, arena_bytes: str
):
    """F35: a state dict made once and saved again and again; whole, and in waves."""
    node.set(FOREBAY_CHECKPOINT__ARENA_BYTES=arena_bytes)
    node.start("checkpoint")
    checkpoints = Checkpointer("run", upstream=upstream)
    stale = torch.randn(700_000)
    seen = []
    for step in range(1, 6):
        if step == 4:
            stale[690_000] += 1.0
        seen.append(checkpoints.save(step, {"w": stale, "step": step}).wait().same_as)
    assert seen == [None, 1, 2, None, 4]
    assert caplog.text.count("seem to be those of step 1") == caplog.text.count("seem to be") == 1


def test_due_by_steps_and_by_seconds(daemon: Node, upstream: str):
    checkpoints = Checkpointer("run", upstream=upstream).every(steps=3)
    assert [step for step in range(10) if checkpoints.due(step)] == [3, 6, 9]
    checkpoints.every(seconds=3600)
    assert not checkpoints.due(1)
    checkpoints.every(seconds=1e-9)
    assert checkpoints.due(1)


@pytest.mark.parametrize("note", [{"metadata": {"x": object()}}, {"metrics": {"loss": "low"}}])
def test_what_cannot_be_kept_is_refused(daemon: Node, upstream: str, note: dict[str, dict[str, object]]):
    with pytest.raises(UnsupportedValue, match="cannot be kept"):
        Checkpointer("run", upstream=upstream).save(1, STATE, **note)  # type: ignore[arg-type]


def test_sigterm_brings_what_is_in_memory_to_the_disk(node: Node, upstream: str):
    """C2: a scheduler ends trainer and daemon together, right after save returned."""
    node.set(FOREBAY_FAILPOINTS="absorb.noted=delay:0.2,landing.begun=delay:1")
    daemon = node.start("checkpoint")
    checkpoints = Checkpointer("run", upstream=upstream)
    handle = checkpoints.save(1, STATE)
    assert handle.status().level == "absorbed"
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(timeout=20) == 0
    node.set(FOREBAY_FAILPOINTS="")
    node.start("checkpoint")
    assert handle.wait().level == "committed"


def test_a_flush_is_over_in_time_and_says_how_far_all_is(
    node: Node, s3: S3Server, monkeypatch: pytest.MonkeyPatch
):
    """Upstream is away: everything is local, and the deadline holds."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    node.start("checkpoint")
    checkpoints = Checkpointer("run", upstream=s3.url("away"))
    for step in (1, 2):
        checkpoints.save(step, STATE)
    command = [
        str(Path(sys.executable).with_name("forebay")),
        "checkpoints",
        "flush",
        "--deadline",
        "2s",
        "--json",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1, run.stderr
    assert [(a["step"], a["level"]) for a in json.loads(run.stdout)] == [(1, "local"), (2, "local")]


def test_a_flush_ends_when_everything_is_committed(daemon: Node, upstream: str):
    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(1, STATE)
    socket = daemon.settings.checkpoint_socket
    flushed = ask(socket, Flush("committed", 30.0), expect=Flushed)
    assert [a.level for a in flushed.attempts] in (["committed"], [])
    assert steps_in(daemon, upstream) == [1]


def test_prepared_in_the_background_or_by_the_first_save(daemon: Node, upstream: str):
    """All buffers are there before they are needed; what grows gets new ones."""
    for prepare in (True, False):
        with Checkpointer(f"run-{prepare}", upstream=upstream, buffers=3) as checkpoints:
            if prepare:
                checkpoints.prepare(STATE, wait=True)
                assert all(buffer.arena for buffer in checkpoints._handover._buffers)
            for step in range(4):
                checkpoints.save(step, STATE)
            arenas = [buffer.arena for buffer in checkpoints._handover._buffers]
            assert all(arenas) and len(set(map(id, arenas))) == 3
            larger = {"w": torch.full((50_000,), 2.0)}
            checkpoints.save(9, larger).wait()
            assert torch.equal(checkpoints.restore()[1]["w"], larger["w"])


def test_too_little_memory_for_the_second_buffer_leaves_one(
    daemon: Node, upstream: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """F12: less comfort, no failure; and no OOM killer."""
    from forebay.checkpointd import arena

    monkeypatch.setattr(arena, "check_memory", lambda need_bytes: None)
    with Checkpointer("run", upstream=upstream) as checkpoints:
        checkpoints._handover._preparing = None
        real = arena.os.posix_fallocate
        made: list[int] = []

        def only_one(fd: int, start: int, size_bytes: int) -> None:
            if made:
                raise OSError(28, "No space left on device")
            made.append(fd)
            real(fd, start, size_bytes)

        monkeypatch.setattr(arena.os, "posix_fallocate", only_one)
        for step in (1, 2, 3):
            checkpoints.save(step, STATE)
        checkpoints.wait()
        assert "going on with 1 of 2 buffers" in caplog.text
        assert checkpoints.restore()[0] == 3


def test_without_a_rule_nothing_goes_not_even_what_is_damaged(daemon: Node, upstream: str):
    """A commit with a file missing is somebody's to look at, not retention's to clear away."""
    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(1, STATE).wait()
    (lost,) = Path(upstream).rglob("*.safetensors")
    lost.unlink()
    checkpoints.save(2, STATE).wait()
    checkpoints.save(3, STATE).wait()
    assert len(list(Path(upstream).rglob("COMMIT.json"))) == 3
