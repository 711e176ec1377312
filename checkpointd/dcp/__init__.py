"""torch.distributed.checkpoint through checkpointd: `dcp.save` blocks for the copy only.

    writer = ForebayWriter("my-run", upstream="s3://bucket/checkpoints")
    dcp.save({"model": model, "optimizer": optimizer}, storage_writer=writer, checkpoint_id="100")
    dcp.load({"model": model, "optimizer": optimizer}, storage_reader=ForebayReader("my-run", upstream=...))

Each rank's tensors go into one safetensors file with the sharding information of torch's own
HuggingFaceStorageWriter, so that stock torch reads the directory with HuggingFaceStorageReader.
What is no tensor is kept as plain JSON in the file's metadata, never as a pickle; torch's planner
is given a pickle made here, from that JSON, at loading.

StorageWriter and StorageReader are implemented directly: torch 2.13's FileSystemWriter loses the
exceptions of its threads and replaces `.metadata` unsafely.
"""

from __future__ import annotations

from forebay.checkpointd.dcp.reader import ForebayReader
from forebay.checkpointd.dcp.writer import ForebayWriter

__all__ = ["ForebayReader", "ForebayWriter"]
