"""The demo is the proof of the whole: run as a newcomer does, its claims and its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Ranks that share two cores with other tests are no ranks.
pytestmark = pytest.mark.alone

KEYS = {
    "accuracy", "epochs", "steps", "ranks", "dataset_bytes", "hot_capacity_bytes", "cold_bytes_fetched",
    "fetches", "evictions", "killed_at_step", "resumed_from_step",
    "batches_identical_to_uninterrupted_run", "samples_lost", "samples_repeated",
    "checkpoint_blocked_ms_p50", "checkpoints_committed", "stock_torch_can_read", "wall_s",
}  # fmt: skip


def test_every_claim_of_the_demo_holds(tmp_path: Path):
    file = tmp_path / "demo.json"
    command = [sys.executable, "-m", "forebay.api.cli", "demo", "--json", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr[-30000:]
    found = json.loads(file.read_text())
    assert set(found) == KEYS
    assert found["accuracy"] >= 0.95 and found["ranks"] == 2
    assert found["hot_capacity_bytes"] < found["dataset_bytes"] and found["evictions"] > 0
    assert found["resumed_from_step"] <= found["killed_at_step"] < found["steps"]
    assert found["batches_identical_to_uninterrupted_run"] is True is found["stock_torch_can_read"]
    assert found["samples_lost"] == 0 == found["samples_repeated"]
