"""The real Trainer of transformers and the real Lightning, unchanged: what they save comes back."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import Node, eventually
from tests.integration.test_dropbox import Watched

HF = """
    import sys, torch
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
        def forward(self, x, labels):
            return {"loss": torch.nn.functional.mse_loss(self.layer(x).squeeze(-1), labels)}

    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(64)]
    arguments = TrainingArguments(
        sys.argv[1], max_steps=int(sys.argv[2]), save_steps=2, per_device_train_batch_size=4, use_cpu=True,
        report_to=[], disable_tqdm=True, save_total_limit=2,
    )
    trainer = Trainer(Net(), arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=sys.argv[3] if len(sys.argv) > 3 else None)
    print("steps", trainer.state.global_step)
"""

LIGHTNING = """
    import sys
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    saver = ModelCheckpoint(dirpath=sys.argv[1], every_n_train_steps=2, save_top_k=-1)
    trainer = pl.Trainer(
        max_steps=int(sys.argv[2]), accelerator="cpu", callbacks=[saver], logger=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )
    trainer.fit(BoringModel(), ckpt_path=sys.argv[3] if len(sys.argv) > 3 else None)
    print("steps", trainer.global_step)
"""


def train(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.mark.parametrize(("recipe", "script"), [("hf", HF), ("lightning", LIGHTNING)])
def test_saved_by_the_tool_taken_and_resumed_from(node: Node, tmp_path: Path, recipe: str, script: str):
    """The tool may remove its own old ones; upstream has all that it let lie long enough."""
    watched = Watched(node, tmp_path)
    watched.start(recipe)
    train(script, watched.folder, 4)
    assert eventually(lambda: 4 in watched.steps())
    watched.fetch(tmp_path / "back", "--step", "4")
    (found,) = [tmp_path / "back"] if recipe == "hf" else (tmp_path / "back").iterdir()
    assert "steps 6" in train(script, watched.folder, 6, found)
    assert eventually(lambda: 6 in watched.steps())
