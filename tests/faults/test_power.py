"""C2 and C3 at a power cut: what the disk holds at that moment, without what only the page cache had.

The daemon's home is an ext4 file system in an image on a loop device, in its least careful mode
(data=writeback, noauto_da_alloc, commits of its journal minutes apart). A cut is a copy of the image
while the daemon is stopped at a named step: dirty pages of the inner file system are not in it. The copy
is mounted, its journal replayed, and a new daemon started on it.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forebay.checkpointd import Checkpointer
from forebay.core.errors import SaveFailed
from forebay.core.failpoint import VARIABLE
from tests.conftest import Node, eventually
from tests.faults.test_checkpoint_steps import every_commit_is_whole, state, value_of

_OPTIONS = "loop,data=writeback,noauto_da_alloc,commit=600"


class Machine:
    """A node whose home loses what was not flushed."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.node = node
        self._image = folder / "disk"
        self._home = node.home / "fb"
        self._home.mkdir()
        with self._image.open("wb") as file:
            file.truncate(192 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(self._image)], check=True)
        self._mount()

    def _mount(self) -> None:
        subprocess.run(["mount", "-o", _OPTIONS, str(self._image), str(self._home)], check=True)

    def off(self) -> None:
        """SIGSTOP, the image as it is, SIGKILL, and everything in memory is gone."""
        daemon = self.node._processes["checkpoint"]
        daemon.send_signal(signal.SIGSTOP)
        after = self._image.with_name("after")
        subprocess.run(["cp", "--sparse=always", str(self._image), str(after)], check=True)
        self.node.kill("checkpoint")
        subprocess.run(["umount", str(self._home)], check=True)
        after.rename(self._image)

    def on(self) -> None:
        self._mount()
        self.node.set(**{VARIABLE: ""})
        self.node.start("checkpoint")

    def close(self) -> None:
        if self.node._processes["checkpoint"].poll() is None:
            self.node.kill("checkpoint")
        subprocess.run(["umount", str(self._home)], check=False)


@pytest.fixture
def machine(node: Node, tmp_path: Path) -> Iterator[Machine]:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4")
    found = Machine(node, tmp_path)
    yield found
    found.close()


STEPS = (
    "landing.begun",
    "landing.written",
    "landing.verified",
    "landing.renamed",
    "spool.filed",
    "spool.manifested",
    "commit.put",
    "commit.local",
)


@pytest.mark.parametrize("upstream", [False, True], ids=["alone", "with upstream"])
@pytest.mark.parametrize("point", STEPS)
def test_power_cut_at_each_step_of_the_second_save(
    machine: Machine, tmp_path: Path, point: str, upstream: bool
):
    """The first was `committed`: it is there in every byte. The second is whole, or it is not there."""
    machine.node.set(**{VARIABLE: f"{point}=delay:60@2"})
    machine.node.start("checkpoint")
    up = str(tmp_path / "up") if upstream else None
    trainer = Checkpointer("run", upstream=up)
    trainer.save(1, state(1)).wait()
    second = trainer.save(2, state(2))
    in_memory = point.startswith(("landing", "spool"))
    if in_memory:
        assert eventually(lambda: second.status().level == "absorbed")
    else:
        # The daemon stands still there and answers nobody: what it has written is looked at.
        root = tmp_path / "up" if upstream else machine.node.settings.spool_dir
        assert eventually(lambda: any(root.rglob("step-000000002/*/COMMIT.json")))
    machine.off()
    machine.on()
    after = Checkpointer("run", upstream=up)
    assert every_commit_is_whole(machine.node, up or str(tmp_path / "none"))
    if in_memory:
        step, found = after.restore()
        assert (step, value_of(found)) == (1, 1)
        with pytest.raises(SaveFailed):
            second.wait(timeout_s=20)
    else:
        assert second.wait(timeout_s=20).level == "committed"
        assert value_of(after.restore()[1]) == 2
    after.save(3, state(3)).wait()
    assert value_of(after.restore()[1]) == 3


def test_local_means_that_the_power_may_go(machine: Machine, tmp_path: Path):
    """C2: cut right after `local`, upstream not even begun; nothing was flushed by anybody else."""
    machine.node.set(**{VARIABLE: "upload.put=delay:60"})
    machine.node.start("checkpoint")
    trainer = Checkpointer("run", upstream=str(tmp_path / "up"))
    handle = trainer.save(1, {"w": torch.full((2_000_000,), 1.0)})
    handle.wait("local")
    machine.off()
    machine.on()
    assert handle.wait(timeout_s=20).level == "committed"
    after = Checkpointer("run", upstream=str(tmp_path / "up"))
    shutil.rmtree(tmp_path / "up")
    assert after.restore()[1]["w"].unique().tolist() == [1.0]


def test_the_attack_works(machine: Machine):
    """What nobody flushed is gone after a cut: or the tests above would prove nothing."""
    machine.node.start("checkpoint")
    path = machine.node.home / "fb" / "unflushed"
    path.write_bytes(b"x" * 100_000)
    machine.off()
    machine.on()
    assert not path.exists() or path.read_bytes() != b"x" * 100_000
