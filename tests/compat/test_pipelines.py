"""The loader inside other libraries' pipelines, and their readers on staged files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import lightning
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torchdata.nodes import Loader, Mapper
from torchdata.stateful_dataloader.stateful import Stateful

from forebay.benchmarks.jobs import register
from forebay.core.protocol import Register
from forebay.loaders import DataLoader, StagedDataset
from forebay.loaders.filesystem import ForebayFileSystem
from forebay.loaders.nodes import LoaderNode
from tests.compat.test_resume import Model, loader, trainer
from tests.conftest import Node

MakeDataset = Callable[[list[int], int], str]


def _keys(batch: Any) -> list[str]:
    return list(batch[0])


def test_a_torchdata_pipeline_resumes_at_the_batch(node: Node, make_dataset: MakeDataset):
    url = make_dataset([7, 5, 9], 50)
    node.start()
    reference = loader(url)
    assert isinstance(reference, Stateful)
    epochs = [[_keys(batch) for batch in reference] for _ in range(2)]
    running = Loader(Mapper(LoaderNode(loader(url)), _keys), restart_on_stop_iteration=True)
    iterator = iter(running)
    seen = [next(iterator) for _ in range(3)]
    state = running.state_dict()
    resumed = Loader(Mapper(LoaderNode(loader(url)), _keys), restart_on_stop_iteration=True)
    resumed.load_state_dict(state)
    assert seen + list(resumed) == epochs[0]
    assert list(resumed) == epochs[1]


class Staged(lightning.LightningDataModule):
    """One loader for training, whose position Lightning saves with its checkpoints; one for validation."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def train_dataloader(self) -> DataLoader:
        return loader(self.url)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(StagedDataset(self.url, fields=("__key__",)), 3)


class Validated(Model):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[str] = []

    def validation_step(self, batch: Any, number: int) -> None:
        self.validated += batch[0]


def test_a_lightning_data_module(node: Node, make_dataset: MakeDataset, tmp_path: Path):
    url = make_dataset([7, 5, 9], 50)
    node.start()
    model = Validated()
    trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0).fit(model, datamodule=Staged(url))
    assert len(model.seen) == 42 and len(set(model.seen)) == 21 and model.seen[:21] != model.seen[21:]
    assert model.validated[:21] == model.validated[21:] == sorted(set(model.seen))


def test_hugging_face_datasets_stream_staged_files(node: Node, tmp_path: Path):
    place = tmp_path / "d"
    place.mkdir()
    for number in range(3):
        pq.write_table(pa.table({"n": np.arange(5) + 10 * number}), place / f"{number}.parquet")
    node.start()
    with node.connect() as channel:
        register(channel, Register(str(place), "raw", "numbers"))
    ForebayFileSystem.clear_instance_cache()
    files = [f"forebay://numbers/{number}.parquet" for number in range(3)]
    found = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    assert [row["n"] for row in found] == [n + 10 * number for number in range(3) for n in range(5)]
    assert node.stager().fetches == 3
