"""Snapshots larger than their arena (F12), and copies that are still under way when `save` returns."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from forebay.checkpointd import Checkpointer, container
from forebay.checkpointd.arena import Arena
from forebay.core.channel import Channel
from forebay.core.errors import DaemonUnavailable, DiskFull, NoCheckpoint, ProtocolError
from forebay.core.failpoint import VARIABLE
from forebay.core.protocol import Absorb, Absorbed, Wave
from tests.conftest import Node, eventually
from tests.integration.test_restore import same, state_of

MIB = 1 << 20


@pytest.fixture
def upstream(node: Node, tmp_path: Path) -> str:
    node.set(FOREBAY_CHECKPOINT__ARENA_BYTES=str(MIB + 1000))
    return str(tmp_path / "up")


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_state_of_many_waves_is_what_save_saw(
    node: Node, upstream: str, buffers: int, monkeypatch: pytest.MonkeyPatch
):
    sizes = []
    make = Arena.__init__
    monkeypatch.setattr(Arena, "__init__", lambda self, size: (sizes.append(size), make(self, size))[1])
    node.start("checkpoint")
    trainer = Checkpointer("run", upstream=upstream, buffers=buffers)
    state = {**state_of(5.0), "turned": torch.arange(600_000.0).reshape(600, 1000).T}
    trainer.prepare(state, wait=True)
    for step in (1, 2):
        handle = trainer.save(step, state)
        assert handle.status().level != "absorbed"
        state["large"].fill_(9.0)
        handle.wait()
        found_step, found = trainer.restore()
        assert found_step == step and same(found, 5.0)
        assert torch.equal(found["turned"], state["turned"])
        state["large"].fill_(5.0)
    assert sizes == [MIB] * buffers
    (file,) = Path(upstream).glob("run/step-000000002/*/*.safetensors")
    assert torch.equal(safetensors.torch.load_file(file)["large"], state["large"])
    # A small one goes the usual way, through the same buffers.
    trainer.save(3, {"w": torch.ones(5)}).wait()
    assert trainer.restore()[1]["w"].tolist() == [1.0] * 5


def test_a_trainer_that_dies_between_waves_leaves_nothing(node: Node, upstream: str):
    node.start("checkpoint")
    script = """
        import os, signal, sys
        from forebay.checkpointd import Checkpointer
        from forebay.checkpointd.container import Container
        from tests.integration.test_restore import state_of
        fill = Container.fill_part
        def third_dies(self, into, start, tensors):
            if start >= 3 << 20:
                os.kill(os.getpid(), signal.SIGKILL)
            fill(self, into, start, tensors)
        Container.fill_part = third_dies
        Checkpointer("run", upstream=sys.argv[1]).save(1, state_of(1.0))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script), upstream], check=False, timeout=60)
    assert run.returncode == -9
    trainer = Checkpointer("run", upstream=upstream)
    with pytest.raises(NoCheckpoint):
        trainer.restore()
    assert eventually(lambda: not node.spool_temporaries())
    trainer.save(2, state_of(2.0)).wait()
    assert same(trainer.restore()[1], 2.0)


def test_a_daemon_that_dies_between_waves(node: Node, upstream: str):
    """C6: save says so. What it had begun is swept at the next start."""
    node.set(**{VARIABLE: "landing.written=kill@3"})
    daemon = node.start("checkpoint")
    trainer = Checkpointer("run", upstream=upstream)
    with pytest.raises(DaemonUnavailable):
        trainer.save(1, state_of(1.0))
    assert daemon.wait(timeout=20) == -9
    node.set(**{VARIABLE: ""})
    node.start("checkpoint")
    trainer.save(2, state_of(2.0)).wait()
    step, found = trainer.restore()
    assert step == 2 and same(found, 2.0)
    assert not node.spool_temporaries()


def test_a_disk_that_is_full_between_waves(node: Node, upstream: str):
    """C7: by name, nothing half-visible, and the next save is as good as ever."""
    node.set(**{VARIABLE: "landing.written=error:ENOSPC@3"})
    node.start("checkpoint")
    trainer = Checkpointer("run", upstream=upstream)
    with pytest.raises(DiskFull):
        trainer.save(1, state_of(1.0))
    assert not node.spool_temporaries()
    trainer.save(2, state_of(2.0)).wait()
    step, found = trainer.restore()
    assert step == 2 and same(found, 2.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [(None, Wave(4096, 8192)), (Wave(0, 8192), Wave(8192, 16384)), (Wave(0, 8192), Wave(4096, 9000))],
    ids=["not begun", "a hole", "another size"],
)
def test_parts_out_of_turn_are_refused(node: Node, upstream: str, first: Wave | None, second: Wave):
    node.start("checkpoint")
    arena = Arena(8192)

    def part(wave: Wave) -> Absorb:
        arena.begin("an-attempt", 4096)
        return Absorb("run", 1, "an-attempt", 0, 1, arena.finish("an-attempt", 4096), upstream, wave=wave)

    with Channel.connect(node.settings.checkpoint_socket, "trainer") as channel:
        if first:
            channel.request(part(first), expect=Absorbed, fds=[arena.fd])
        with pytest.raises(ProtocolError, match="wave at"):
            channel.request(part(second), expect=Absorbed, fds=[arena.fd])
    arena.close()
    assert eventually(lambda: not node.spool_temporaries())


class LateCopies:
    """What a GPU does: copies begin at `copy` and are there after `finish`."""

    go = threading.Event()

    def __init__(self) -> None:
        self._begun: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._begun.append((target, source))

    def finish(self) -> None:
        assert self.go.wait(30)
        for target, source in self._begun:
            target.copy_(source)


def test_copies_overlap_the_trainer_until_its_next_step(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """C1 with `overlap`: the optimizer waits for what `save` saw, by its own hook."""
    monkeypatch.setattr(container, "DeviceCopies", LateCopies)
    LateCopies.go.clear()
    node.start("checkpoint")
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    trainer = Checkpointer("run", upstream=str(tmp_path / "up"), overlap=True)
    optimizer.register_step_pre_hook(trainer.wait_before_step)
    handle = trainer.save(1, {"w": weight})
    weight.sum().backward()
    # Nothing was copied yet: save has returned all the same.
    threading.Timer(0.2, LateCopies.go.set).start()
    optimizer.step()
    assert weight.detach().eq(0).all()
    handle.wait()
    assert trainer.restore()[1]["w"].eq(1).all()
    trainer.save(2, {"w": weight}).wait()
    assert trainer.restore()[1]["w"].eq(0).all()
    trainer.close()


def test_what_fails_on_the_way_is_said_once(node: Node, tmp_path: Path):
    node.start("checkpoint")
    trainer = Checkpointer("run", upstream=str(tmp_path / "up"), overlap=True)
    trainer.save(1, {"w": torch.ones(5)}).wait()
    node.kill("checkpoint")
    trainer.save(2, {"w": torch.ones(5)})
    with pytest.raises(DaemonUnavailable):
        trainer.wait_before_step()
    trainer.wait_before_step()
    node.start("checkpoint")
    trainer.save(3, {"w": torch.ones(5)}).wait()
    assert trainer.restore()[0] == 3
    trainer.close()


def test_what_a_save_has_raised_is_not_raised_again(node: Node, tmp_path: Path):
    """C6: the daemon was away, save said so; the next one, with the daemon back, is as good as ever."""
    node.start("checkpoint")
    trainer = Checkpointer("run", upstream=str(tmp_path / "up"))
    trainer.save(1, {"w": torch.ones(5)}).wait()
    node.kill("checkpoint")
    with pytest.raises(DaemonUnavailable):
        trainer.save(2, {"w": torch.ones(5)})
    node.start("checkpoint")
    trainer.save(3, {"w": torch.ones(5)}).wait()
    assert trainer.restore()[0] == 3
    trainer.close()
