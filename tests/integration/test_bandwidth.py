"""One budget for the node: checkpointd moves what stagerd grants, and keeps to the rate when alone."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from forebay.benchmarks.seaweed import S3Server
from forebay.checkpointd import Checkpointer
from forebay.core.channel import ask
from forebay.core.protocol import GetMetrics, MetricsText
from tests.conftest import Node

MB = 1_000_000


def granted(node: Node) -> dict[str, float]:
    """Class -> bytes that stagerd has let checkpointd move."""
    text = ask(node.settings.stager_socket, GetMetrics(), expect=MetricsText).text
    return {
        found[1]: float(found[2])
        for found in re.finditer(r'forebay_stager_granted_bytes_total\{class="(\w+)"\} (\S+)', text)
    }


def file_bytes(node: Node) -> int:
    return sum(path.stat().st_size for path in node.settings.spool_dir.rglob("*.safetensors"))


@pytest.mark.parametrize("part", ["5MiB", "64MB"])
def test_every_byte_up_and_down_is_granted(node: Node, s3: S3Server, prefix: str, part: str):
    """In parts and whole; a restore asks as what it is."""
    node.set(FOREBAY_NETWORK__RATE="50MB", FOREBAY_CHECKPOINT__PART_BYTES=part)
    node.set(FOREBAY_TRANSFER__WHOLE_BYTES="2MB", FOREBAY_TRANSFER__RANGE_BYTES="1MB")
    node.start("stager")
    node.start("checkpoint")
    checkpoints = Checkpointer("run", upstream=s3.url(f"{prefix}/ckpt"))
    state = {"w": torch.arange(4 * MB, dtype=torch.float32)}
    assert checkpoints.save(1, state).wait().level == "committed"
    size_bytes = file_bytes(node)
    assert granted(node) == {"drain": size_bytes}
    checkpoints.close()
    shutil.rmtree(node.settings.spool_dir / "runs/run")
    step, found = checkpoints.restore()
    assert step == 1 and torch.equal(found["w"], state["w"])
    assert granted(node) == {"drain": size_bytes, "restore": size_bytes}


@pytest.mark.parametrize("gone", ["never there", "killed"])
def test_without_stagerd_the_rate_holds_alone(node: Node, s3: S3Server, prefix: str, gone: str):
    node.set(FOREBAY_NETWORK__RATE="50MB", FOREBAY_CHECKPOINT__PART_BYTES="5MiB")
    if gone == "killed":
        node.start("stager")
        node.kill("stager")
    node.start("checkpoint")
    checkpoints = Checkpointer("run", upstream=s3.url(f"{prefix}/ckpt"))
    assert checkpoints.save(1, {"w": torch.ones(4 * MB)}).wait().level == "committed"
    assert node.log("checkpoint").count("stagerd grants nothing") == 1


def test_without_a_rate_nobody_is_asked(node: Node, s3: S3Server, prefix: str):
    node.start("stager")
    node.start("checkpoint")
    Checkpointer("run", upstream=s3.url(f"{prefix}/ckpt")).save(1, {"w": torch.ones(10)}).wait()
    assert granted(node) == {}
