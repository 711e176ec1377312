"""A partner's disk: losing a node between `local` and `committed` loses nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from forebay.benchmarks.seaweed import S3Server, free_ports
from forebay.checkpointd import Checkpointer
from forebay.core.errors import NoCheckpoint
from tests.conftest import Node, eventually

STATE = {"w": torch.full((300_000,), 5.0)}


@pytest.fixture
def partner(node: Node, tmp_path: Path) -> Path:
    folder = tmp_path / "partner"
    node.set(FOREBAY_CHECKPOINT__PARTNER=str(folder))
    return folder


def test_a_lost_node_loses_nothing(
    node: Node, partner: Path, s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
):
    """Upstream is away, the node dies with its disk; another one with the same partner has it all."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    upstream = s3.url(f"{prefix}/ckpt")
    node.start("checkpoint")
    handle = Checkpointer("run", upstream=upstream).save(7, STATE)
    status = handle.wait("replicated", timeout_s=20)
    assert status.level == "replicated" and status.replicated_at
    node.kill("checkpoint")
    shutil.rmtree(node.settings.home)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    node.start("checkpoint")
    checkpoints = Checkpointer("run", upstream=upstream)
    step, state = checkpoints.restore()
    assert step == 7 and torch.equal(state["w"], STATE["w"])
    latest = checkpoints.latest()
    assert latest and latest.step == 7 and "upstream" in latest.tiers


def test_what_other_ranks_brought_upstream_is_completed_from_the_partner(
    node: Node, partner: Path, s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
):
    """Rank 1's node is lost before its upload; rank 0 is upstream already."""
    upstream = s3.url(f"{prefix}/ckpt")
    node.set(FOREBAY_FAILPOINTS="multipart.sent=kill,upload.put=delay:60@2")
    node.start("checkpoint")
    lost = Checkpointer("run", upstream=upstream, rank=1, world_size=2, session="s1")
    lost.save(3, STATE).wait("replicated", timeout_s=20)
    node.kill("checkpoint")
    shutil.rmtree(node.settings.home)
    node.set(FOREBAY_FAILPOINTS="")
    node.start("checkpoint")
    other = Checkpointer("run", upstream=upstream, rank=0, world_size=2, session="s1")
    other.save(3, STATE).wait("durable", timeout_s=20)
    step, state = Checkpointer("run", upstream=upstream, rank=1, world_size=2, session="s2").restore()
    assert step == 3 and torch.equal(state["w"], STATE["w"])


def test_a_partner_that_is_away_fails_nothing(node: Node, tmp_path: Path):
    place = tmp_path / "file"
    place.write_text("no directory")
    node.set(FOREBAY_CHECKPOINT__PARTNER=str(place / "x"))
    node.start("checkpoint")
    checkpoints = Checkpointer("run", upstream=str(tmp_path / "up"))
    assert checkpoints.save(1, STATE).wait().level == "committed"
    assert checkpoints.restore()[0] == 1
    assert "not on the partner" in node.log("checkpoint")


def test_the_partner_keeps_as_many_as_the_spool(node: Node, partner: Path, tmp_path: Path):
    node.start("checkpoint")
    checkpoints = Checkpointer("run", upstream=str(tmp_path / "up"))
    for step in (1, 2, 3, 4):
        checkpoints.save(step, STATE).wait()
    wanted = ["step-000000003", "step-000000004"]
    assert eventually(lambda: sorted(path.parts[-3] for path in partner.rglob("COMMIT.json")) == wanted)


def test_a_damaged_spool_file_is_taken_from_the_partner(node: Node, partner: Path, tmp_path: Path):
    node.start("checkpoint")
    checkpoints = Checkpointer("run", upstream=str(tmp_path / "up"))
    checkpoints.save(1, STATE).wait()
    checkpoints.close()
    for root in (node.settings.spool_dir / "runs", tmp_path / "up"):
        (path,) = root.rglob("*.safetensors")
        path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(checkpoints.restore()[1]["w"], STATE["w"])


def test_without_a_partner_nothing_is_rescued(node: Node, tmp_path: Path):
    node.start("checkpoint")
    with pytest.raises(NoCheckpoint):
        Checkpointer("run", upstream=str(tmp_path / "up")).restore()
