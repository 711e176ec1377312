"""Trainers that look for `state_dict` on a loader find ours, and resume at the sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from forebay.loaders import DataLoader, StagedDataset
from tests.conftest import Node

MakeDataset = Callable[[list[int], int], str]


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[str] = []
        self.dies_at: int | None = None

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if number == self.dies_at:
            raise RuntimeError("dies")
        self.seen += batch[0]
        return (self.weight - 1.0).pow(2).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, **options: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", default_root_dir=folder, **quiet, **options)  # type: ignore[arg-type]


def loader(url: str) -> DataLoader:
    return DataLoader(StagedDataset(url, fields=("__key__",)), 3, shuffle=True, seed=3, shuffle_block=2)


def test_lightning_resumes_in_mid_epoch(node: Node, make_dataset: MakeDataset, tmp_path: Path):
    url = make_dataset([7, 5, 9], 50)
    node.start()
    whole = Model()
    trainer(tmp_path, max_epochs=2).fit(whole, loader(url))
    assert len(whole.seen) == 42 and len(set(whole.seen)) == 21 and whole.seen[:21] != whole.seen[21:]
    first, second = Model(), Model()
    first.dies_at = 5
    saves = ModelCheckpoint(tmp_path, "x", every_n_train_steps=3)
    with pytest.raises(RuntimeError, match="dies"):
        trainer(tmp_path, max_epochs=2, callbacks=[saves]).fit(first, loader(url))
    trainer(tmp_path, max_epochs=2).fit(second, loader(url), ckpt_path=tmp_path / "x.ckpt")
    assert first.seen[:9] + second.seen == whole.seen


def test_lightning_goes_on_after_a_whole_epoch(node: Node, make_dataset: MakeDataset, tmp_path: Path):
    """Its checkpoint at the end of an epoch is taken before the loader was asked for another batch."""
    url = make_dataset([7, 5, 9], 50)
    node.start()
    whole, first, second = Model(), Model(), Model()
    trainer(tmp_path, max_epochs=3).fit(whole, loader(url))
    saves = ModelCheckpoint(tmp_path, "end", save_last=True)
    trainer(tmp_path, max_epochs=1, callbacks=[saves]).fit(first, loader(url))
    trainer(tmp_path, max_epochs=3).fit(second, loader(url), ckpt_path=tmp_path / "last.ckpt")
    assert first.seen + second.seen == whole.seen


def test_accelerate_saves_and_restores_it(node: Node, make_dataset: MakeDataset, tmp_path: Path):
    """As an object of its own: it has state_dict and load_state_dict."""
    from accelerate import Accelerator

    url = make_dataset([7, 5, 9], 50)
    node.start()
    whole = [key for (keys,) in loader(url) for key in keys]
    accelerator, running = Accelerator(cpu=True), loader(url)
    accelerator.register_for_checkpointing(running)
    batches = iter(running)
    seen = [key for _ in range(2) for key in next(batches)[0]]
    accelerator.save_state(str(tmp_path / "state"))
    resumed = loader(url)
    again = Accelerator(cpu=True)
    again.register_for_checkpointing(resumed)
    again.load_state(str(tmp_path / "state"))
    assert seen + [key for (keys,) in resumed for key in keys] == whole
