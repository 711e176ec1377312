"""Other people's code on what Forebay stages and writes, and the reverse."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from forebay.benchmarks.seaweed import S3Server
from forebay.checkpointd import Checkpointer, ForebayWriter
from forebay.core.channel import close_all
from forebay.core.protocol import DatasetReply, NeedShard, Register, ShardReady
from forebay.loaders import DataLoader, StagedDataset
from tests.conftest import Node

MakeDataset = Callable[[list[int], int], str]


def test_webdataset_reads_the_same_samples_from_a_staged_descriptor(node: Node, make_dataset: MakeDataset):
    webdataset = pytest.importorskip("webdataset")
    url = make_dataset([7, 3], 100)
    node.start()
    ours = [
        (key, data)
        for keys, datas in DataLoader(StagedDataset(url, fields=("__key__", "bin")), 4)
        for key, data in zip(keys, datas, strict=True)
    ]
    theirs = []
    with node.connect() as channel:
        reply, fds = channel.request(Register(url), expect=DatasetReply)
        close_all(fds)
        for shard in range(2):
            _, fds = channel.request(NeedShard(reply.dataset.id, shard), expect=ShardReady)
            path = f"/proc/self/fd/{fds[0]}"
            theirs += [
                (sample["__key__"], sample["bin"])
                for sample in webdataset.WebDataset(path, shardshuffle=False, empty_check=False)
            ]
            close_all(fds)
    assert ours == theirs


def test_s3fs_is_a_source_like_obstore(node: Node, make_dataset: MakeDataset):
    """The same objects through fsspec: the same batches."""
    pytest.importorskip("s3fs")
    url = make_dataset([4, 6, 2], 100)
    node.start()

    def batches(source: str) -> list[list[str]]:
        loader = DataLoader(StagedDataset(source, fields=("__key__",)), 4, shuffle=True, seed=3)
        return [keys for (keys,) in loader]

    assert batches(url) == batches(url.replace("s3://", "s3fs://"))


def test_any_fsspec_url_takes_checkpoints(node: Node, s3: S3Server, prefix: str):
    pytest.importorskip("s3fs")
    node.start("checkpoint")
    upstream = f"s3fs://{s3.bucket}/{prefix}/ckpt"
    checkpoints = Checkpointer("run", upstream=upstream)
    checkpoints.save(1, {"w": torch.full((1000,), 3.0)}).wait()
    fs = fsspec.filesystem("s3", client_kwargs={"endpoint_url": s3.endpoint})
    assert len(fs.find(f"{s3.bucket}/{prefix}/ckpt/run")) == 3
    assert checkpoints.restore()[1]["w"].unique().tolist() == [3.0]


def test_safetensors_and_stock_dcp_read_a_checkpoint(node: Node, s3: S3Server, tmp_path: Path):
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    node.start("checkpoint")
    model = torch.nn.Linear(5, 4)
    Checkpointer("plain", upstream=str(tmp_path / "up")).save(1, {"model": model.state_dict()}).wait()
    writer = ForebayWriter("dcp", upstream=str(tmp_path / "up"))
    dcp.save({"model": model.state_dict()}, storage_writer=writer, checkpoint_id="1")
    writer.wait()
    for run in ("plain", "dcp"):
        (file,) = (tmp_path / "up" / run).rglob("*.safetensors")
        found = safetensors.torch.load_file(file)
        assert torch.equal(found["model.weight"], model.weight)
        target = {f"model.{name}": torch.zeros_like(t) for name, t in model.state_dict().items()}
        dcp.load(target, storage_reader=HuggingFaceStorageReader(os.fspath(file.parent)))
        assert torch.equal(target["model.weight"], model.weight)
