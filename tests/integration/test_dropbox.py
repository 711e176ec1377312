"""Folders that other tools write: taken when complete, once, whole, and never what they did not write."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forebay.core.channel import ask
from forebay.core.protocol import Checkpoint, Checkpoints, ListCheckpoints
from tests.conftest import Node, eventually

SETTLE_S = 0.3


class Watched:
    """A node that watches `folder` for the run `job`; `up` is where its checkpoints go."""

    def __init__(self, node: Node, tmp_path: Path) -> None:
        self.node = node
        self.folder = tmp_path / "out"
        self.folder.mkdir()
        self.up = tmp_path / "up"

    def start(self, recipe: str) -> None:
        config = self.node.home / "forebay.toml"
        config.write_text(
            f'[[dropbox]]\npath = "{self.folder}"\nrun = "job"\nupstream = "{self.up}"\n'
            f'recipe = "{recipe}"\nsettle_s = {SETTLE_S}\n'
        )
        self.node.set(FOREBAY_CONFIG=str(config))
        self.node.start("checkpoint")

    def checkpoints(self, run: str = "job") -> list[Checkpoint]:
        request = ListCheckpoints(run, str(self.up))
        found = ask(self.node.settings.checkpoint_socket, request, expect=Checkpoints).checkpoints
        return [c for c in found if "upstream" in c.tiers and not c.problem]

    def steps(self, run: str = "job") -> list[int]:
        return [c.step for c in self.checkpoints(run)]

    def fetch(self, into: Path, *arguments: str) -> dict[str, bytes]:
        forebay = Path(sys.executable).with_name("forebay")
        command = [str(forebay), "checkpoints", "restore", "job", str(into), "--upstream", str(self.up)]
        subprocess.run([*command, *arguments], check=True, timeout=60, capture_output=True)
        return tree(into)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def watched(node: Node, tmp_path: Path) -> Watched:
    return Watched(node, tmp_path)


def saved(value: float) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.full((50_000,), value)}, buffer)
    return buffer.getvalue()


def write_hf(folder: Path, step: int) -> Callable[[], None]:
    root = folder / f"checkpoint-{step}"
    (root / "sub").mkdir(parents=True)
    (root / "model.safetensors").write_bytes(os.urandom(200_000))
    (root / "sub" / "optimizer.pt").write_bytes(saved(step))
    return lambda: (root / "trainer_state.json").write_text(json.dumps({"global_step": step})) and None


def write_lightning(folder: Path, step: int) -> Callable[[], None]:
    path, data = folder / f"epoch=1-step={step}.ckpt", saved(step)
    path.write_bytes(data[:-100])
    return lambda: path.write_bytes(data) and None


def write_megatron(folder: Path, step: int) -> Callable[[], None]:
    for rank in range(2):
        place = folder / f"iter_{step:07d}" / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        (place / "model_optim_rng.pt").write_bytes(saved(step))
    return lambda: (folder / "latest_checkpointed_iteration.txt").write_text(str(step)) and None


def write_dcp(folder: Path, step: int) -> Callable[[], None]:
    root = folder / f"step_{step}"
    root.mkdir()
    (root / "__0_0.distcp").write_bytes(os.urandom(100_000))
    return lambda: (root / ".metadata").write_bytes(b"plan") and None


WRITERS = {"hf": write_hf, "lightning": write_lightning, "megatron": write_megatron, "dcp": write_dcp}


@pytest.mark.parametrize("recipe", WRITERS)
def test_taken_when_it_is_complete_and_not_before(watched: Watched, tmp_path: Path, recipe: str):
    """What is written while the daemon runs, and what was there before; each once, byte for byte."""
    WRITERS[recipe](watched.folder, 100)()
    watched.start(recipe)
    assert eventually(lambda: watched.steps() == [100])
    complete = WRITERS[recipe](watched.folder, 200)
    time.sleep(3 * SETTLE_S)
    assert watched.steps() == [100]
    complete()
    assert eventually(lambda: watched.steps() == [200, 100])
    place = {"hf": "checkpoint-200", "dcp": "step_200", "megatron": "iter_0000200"}.get(recipe, ".")
    wanted = {name: data for name, data in tree(watched.folder / place).items() if "step=100" not in name}
    assert watched.fetch(tmp_path / "back") == wanted
    assert len(watched.checkpoints()) == 2


def test_after_a_restart_only_what_is_new_is_taken(watched: Watched):
    write_hf(watched.folder, 1)()
    watched.start("hf")
    assert eventually(lambda: watched.steps() == [1])
    first = watched.checkpoints()[0].committed_at
    watched.node.kill("checkpoint")
    write_hf(watched.folder, 2)()
    watched.node.start("checkpoint")
    assert eventually(lambda: watched.steps() == [2, 1])
    assert watched.checkpoints()[1].committed_at == first


def test_kill_9_while_it_is_taken(watched: Watched):
    """Nothing half-visible; taken again from the folder."""
    watched.node.set(FOREBAY_FAILPOINTS="spool.manifested=kill@1")
    write_hf(watched.folder, 1)()
    watched.start("hf")
    assert eventually(lambda: watched.node._processes["checkpoint"].poll() == -9)
    watched.node.set(FOREBAY_FAILPOINTS="")
    watched.node.start("checkpoint")
    assert eventually(lambda: watched.steps() == [1])


def test_a_file_that_is_overwritten_in_place_is_a_checkpoint_each_time(watched: Watched, tmp_path: Path):
    """nanoGPT: what was taken keeps its bytes although the file does not."""
    path = watched.folder / "ckpt.pt"
    watched.start("file")
    path.write_bytes(saved(1.0))
    assert eventually(lambda: len(watched.steps("job.ckpt")) == 1)
    with path.open("r+b") as file:
        file.write(saved(2.0))
    os.utime(path, (time.time() - 1, path.stat().st_mtime + 10))
    os.utime(path)
    assert eventually(lambda: len(watched.steps("job.ckpt")) == 2)
    values = {
        float(torch.load(found, weights_only=True)["w"][0]) for found in watched.up.rglob("files/ckpt.pt")
    }
    assert values == {1.0, 2.0}


def test_what_the_tool_removed_stays_upstream(watched: Watched):
    """save_total_limit: the trainer's folder goes, the checkpoint does not."""
    import shutil

    write_hf(watched.folder, 1)()
    watched.start("hf")
    assert eventually(lambda: watched.steps() == [1])
    shutil.rmtree(watched.folder / "checkpoint-1")
    write_hf(watched.folder, 2)()
    assert eventually(lambda: watched.steps() == [2, 1])


def test_links_and_strangers_are_not_taken(watched: Watched, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("not yours")
    complete = write_hf(watched.folder, 1)
    (watched.folder / "checkpoint-1" / "link").symlink_to(secret)
    (watched.folder / "checkpoint-2").symlink_to(tmp_path)
    (watched.folder / "notes.txt").write_text("a user's")
    complete()
    watched.start("hf")
    assert eventually(lambda: watched.steps() == [1])
    assert not [path for path in watched.up.rglob("*") if path.name in ("link", "secret", "notes.txt")]
    assert secret.read_text() == "not yours"


def test_a_folder_that_comes_later_is_watched(watched: Watched):
    watched.folder.rmdir()
    watched.start("hf")
    watched.folder.mkdir()
    write_hf(watched.folder, 5)()
    watched.node.kill("checkpoint")
    watched.node.start("checkpoint")
    assert eventually(lambda: watched.steps() == [5])


def test_a_file_that_changes_while_it_is_taken_is_taken_again(watched: Watched):
    """The copy is given up, and what the file holds afterwards becomes the checkpoint."""
    watched.node.set(FOREBAY_FAILPOINTS="spool.manifested=delay:0.5")
    path = watched.folder / "ckpt.pt"
    path.write_bytes(saved(1.0))
    watched.start("file")
    assert eventually(lambda: len(watched.steps("job.ckpt")) >= 1)
    path.write_bytes(saved(2.0))
    assert eventually(
        lambda: (
            2.0
            in [float(torch.load(f, weights_only=True)["w"][0]) for f in watched.up.rglob("files/ckpt.pt")]
        )
    )
