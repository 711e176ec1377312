"""C9: an upload goes on where it was broken off, and what nobody goes on with is given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import boto3
import obstore
import pytest
import torch

from forebay.benchmarks.seaweed import S3Server
from forebay.checkpointd import Checkpointer, SaveHandle
from forebay.checkpointd.layout import is_our_key
from forebay.core.channel import ask
from forebay.core.config import Settings
from forebay.core.failpoint import VARIABLE
from forebay.core.protocol import GetMetrics, MetricsText
from forebay.tiers.store import open_store
from tests.conftest import Node, eventually

PART = 5 << 20
STATE = {"w": torch.arange(10_000_000, dtype=torch.float32)}


@pytest.fixture
def client(s3: S3Server) -> Any:
    return boto3.client("s3", endpoint_url=s3.endpoint, region_name="us-east-1")


def uploads(client: Any, s3: S3Server, prefix: str) -> list[dict[str, Any]]:
    found = client.list_multipart_uploads(Bucket=s3.bucket, Prefix=prefix).get("Uploads", [])
    return [upload for upload in found if upload["Key"].startswith(prefix)]


def killed_in_an_upload(node: Node, s3: S3Server, prefix: str) -> SaveHandle:
    """After the fourth of eight parts; the daemon is gone, the upload is not."""
    node.set(FOREBAY_CHECKPOINT__PART_BYTES=str(PART), **{VARIABLE: "multipart.sent=kill@4"})
    daemon = node.start("checkpoint")
    handle = Checkpointer("run", upstream=s3.url(f"{prefix}/ckpt")).save(1, STATE)
    assert daemon.wait(timeout=30) == -9
    node.set(**{VARIABLE: ""})
    return handle


def restored(node: Node, s3: S3Server, prefix: str) -> bool:
    """From upstream alone."""
    for path in (node.settings.spool_dir / "runs").rglob("*.safetensors"):
        path.unlink()
    checkpoints = Checkpointer("run", upstream=s3.url(f"{prefix}/ckpt"))
    return torch.equal(checkpoints.restore()[1]["w"], STATE["w"])


def records(node: Node) -> list[Path]:
    return list((node.settings.spool_dir / "runs").rglob("*.upload"))


def test_the_next_daemon_sends_only_what_is_missing(node: Node, s3: S3Server, prefix: str, client: Any):
    handle = killed_in_an_upload(node, s3, prefix)
    (upload,) = uploads(client, s3, prefix)
    parts = client.list_parts(Bucket=s3.bucket, Key=upload["Key"], UploadId=upload["UploadId"])["Parts"]
    assert len(parts) >= 4 and len(records(node)) == 1
    # Of eight parts it may send four at most.
    node.set(**{VARIABLE: "multipart.sent=kill@5"})
    node.start("checkpoint")
    assert handle.wait(timeout_s=30).level == "committed"
    assert "upload goes on" in node.log("checkpoint")
    assert not uploads(client, s3, prefix) and not records(node)
    assert restored(node, s3, prefix)


def test_a_part_that_is_not_the_files_is_sent_again(node: Node, s3: S3Server, prefix: str, client: Any):
    handle = killed_in_an_upload(node, s3, prefix)
    (upload,) = uploads(client, s3, prefix)
    at = {"Bucket": s3.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
    client.upload_part(**at, PartNumber=2, Body=b"x" * PART)
    node.start("checkpoint")
    assert handle.wait(timeout_s=30).level == "committed" and restored(node, s3, prefix)


@pytest.mark.parametrize("loss", ["the upload", "the record", "a damaged record"])
def test_without_a_trace_it_begins_anew(node: Node, s3: S3Server, prefix: str, client: Any, loss: str):
    handle = killed_in_an_upload(node, s3, prefix)
    (upload,) = uploads(client, s3, prefix)
    (record,) = records(node)
    if loss == "the upload":
        client.abort_multipart_upload(Bucket=s3.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    elif loss == "the record":
        record.unlink()
    else:
        record.write_bytes(b'{"url": 7')
    node.start("checkpoint")
    assert handle.wait(timeout_s=30).level == "committed" and restored(node, s3, prefix)


def test_what_is_upstream_already_is_not_sent_again(node: Node, s3: S3Server, prefix: str):
    """Killed between the end of the upload and the journal: one look, no bytes."""
    node.set(FOREBAY_CHECKPOINT__PART_BYTES=str(PART), **{VARIABLE: "upload.put=kill@1"})
    daemon = node.start("checkpoint")
    handle = Checkpointer("run", upstream=s3.url(f"{prefix}/ckpt")).save(1, STATE)
    assert daemon.wait(timeout=30) == -9
    (before,) = [
        info
        for info in obstore.list(s3.store(), prefix).collect()
        if info["path"].endswith("rank-00000.safetensors")
    ]
    node.set(**{VARIABLE: "multipart.sent=kill@1"})
    node.start("checkpoint")
    assert handle.wait(timeout_s=30).level == "committed"
    assert obstore.head(s3.store(), before["path"])["last_modified"] == before["last_modified"]


def test_only_our_abandoned_uploads_are_aborted(s3: S3Server, prefix: str, client: Any):
    ours = f"{prefix}/run/step-000000007/abc-000001/rank-00000.safetensors"
    others = [f"{prefix}/run/notes.bin", f"{prefix}/other/step-000000007/abc/rank-00000.safetensors"]
    for key in (ours, *others):
        client.create_multipart_upload(Bucket=s3.bucket, Key=key)
    store = open_store(s3.url(prefix), Settings.load())
    assert anyio.run(store.abort_abandoned, "run/", 3600.0, is_our_key) == 0
    assert anyio.run(store.abort_abandoned, "run/", -3600.0, is_our_key) == 1
    assert eventually(lambda: sorted(u["Key"] for u in uploads(client, s3, prefix)) == sorted(others))


def counted(node: Node, name: str) -> float:
    """A counter of checkpointd."""
    text = ask(node.settings.checkpoint_socket, GetMetrics(), expect=MetricsText).text
    (line,) = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("gone", [False, True], ids=["there", "removed"])
def test_unchanged_parts_are_copied_by_the_store(
    node: Node, s3: S3Server, prefix: str, client: Any, gone: bool
):
    """LoRA: a frozen base of 30 MB and a little that changes; each checkpoint is whole on its own."""
    node.set(FOREBAY_CHECKPOINT__PART_BYTES=str(PART))
    node.start("checkpoint")
    upstream = s3.url(f"{prefix}/ckpt")
    state = {"base": torch.arange(7_500_000, dtype=torch.float32), "lora": torch.zeros(100_000)}
    with Checkpointer("run", upstream=upstream, reuse=True) as checkpoints:
        for step in (1, 2, 30_000):
            state["lora"].fill_(float(step))
            if gone and step > 2:
                key = next(
                    info["path"]
                    for info in obstore.list(s3.store(), f"{prefix}/ckpt/run/step-000000002").collect()
                    if info["path"].endswith(".safetensors")
                )
                obstore.delete(s3.store(), key)
            checkpoints.save(step, state).wait()
    copied = counted(node, "forebay_checkpoint_copied_bytes_total")
    assert copied == (1 if gone else 2) * 5 * PART
    for root in (node.settings.spool_dir / "runs").rglob("step-*"):
        for path in root.rglob("*.safetensors"):
            path.unlink()
    checkpoints = Checkpointer("run", upstream=upstream)
    for step in (1, 30_000):
        found = checkpoints.restore(step)[1]
        assert torch.equal(found["base"], state["base"]) and found["lora"].unique().tolist() == [step]
