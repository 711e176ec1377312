"""Ranks that watch each other through torch.distributed's store, fed by real daemons."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from forebay.core.channel import ask
from forebay.core.protocol import GetMetrics, MetricsText
from forebay.loaders import DataLoader, StagedDataset
from forebay.loaders.pacing import Pacing
from tests.conftest import Node, eventually
from tests.integration.test_dcp import torchrun

# Ranks that share two cores with other tests are no ranks.
pytestmark = pytest.mark.alone

MakeDataset = Callable[[list[int], int], str]

RANKS = """
import logging, sys, threading, time
import torch.distributed as dist
from forebay.loaders import DataLoader, StagedDataset
from forebay.loaders.pacing import Pacing
logging.basicConfig(level=logging.INFO)
dist.init_process_group("gloo")
rank = dist.get_rank()
held = threading.Event()
def transform(sample):
    # Rank 1 decodes one sample until rank 0 has raised the alarm.
    if rank == 1 and sample[0].endswith("0006"):
        held.wait(20)
    return sample
class Heard(logging.Handler):
    def emit(self, record):
        if "has waited" in record.getMessage():
            held.set()
logging.getLogger("forebay.loaders").addHandler(Heard())
dataset = StagedDataset(sys.argv[1], fields=("__key__",), transform=transform)
pacing = Pacing(interval_s=0.1, line_s=0.3, alarm_s=1.0, gate_s=5.0, runway_s=0.1)
loader = DataLoader(dataset, 2, pacing=pacing)
for batch in loader:
    time.sleep(0.02)
    dist.barrier()
found = loader.stats.lockstep
assert found.ranks == 2 and found.step > 0, found
with open(f"{sys.argv[2]}/{rank}", "w") as file:
    file.write(found.line())
dist.barrier()
dist.destroy_process_group()
"""


def test_a_rank_that_is_late_is_named_on_the_first_rank(
    node: Node, make_dataset: MakeDataset, tmp_path: Path
):
    """F22: rank, node and cause, long before a collective gives up."""
    url = make_dataset([20] * 4, 50)
    node.start()
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    said = torchrun(2, str(script), url, str(tmp_path))
    first = [line for line in said.splitlines() if "has waited" in line]
    assert any(f"rank 1 on {os.uname().nodename} has waited" in line for line in first), said[-3000:]
    assert any("decoding: the samples are here" in line for line in first)
    assert "2 ranks wait" in said
    assert {(tmp_path / str(rank)).read_text().count("2 ranks wait") for rank in range(2)} == {1}


def test_a_shard_that_does_not_come_is_named(
    node: Node, make_dataset: MakeDataset, caplog: pytest.LogCaptureFixture
):
    """stagerd is there and says nothing: cause and shard, while the loader waits."""
    url = make_dataset([3] * 3, 50)
    daemon = node.start()
    caplog.set_level(logging.ERROR, "forebay.loaders")
    dataset = StagedDataset(url, fields=("__key__",))
    loader = DataLoader(dataset, 1, prefetch=1, pacing=Pacing(interval_s=0.05, alarm_s=0.3))
    batches = iter(loader)
    next(batches)
    os.kill(daemon.pid, signal.SIGSTOP)
    taken: list[object] = []
    reader = threading.Thread(target=lambda: taken.extend(batches))
    reader.start()
    try:
        assert eventually(lambda: "has waited" in caplog.text, 20)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
        reader.join(30)
    assert len(taken) == 8
    assert "storage: s3://" in caplog.text or "network: stagerd" in caplog.text


def test_a_node_gives_way_as_it_is_told(node: Node, make_dataset: MakeDataset):
    url = make_dataset([10] * 30, 2000)
    node.start()
    dataset = StagedDataset(url, fields=("__key__",))
    with dataset.open_session() as session:
        first = session.pace(0)
        assert first.ahead_bytes == 0
        session.open_plan(range(30), 2)
        # What came before the word stays; what counts as ahead, and is fetched, ends there.
        assert eventually(lambda: session.pace(50_000).ends)
        assert session.pace(50_000).ahead_bytes < 100_000
        assert eventually(lambda: session.pace(None).ends and node.stager().shards == 30)
        assert session.pace(None).ahead_bytes > 500_000


def test_stagerd_shows_the_ranks_of_its_node_while_they_live(node: Node, make_dataset: MakeDataset):
    """For Prometheus: trainers come and go, the daemon is what is scraped."""
    url = make_dataset([10] * 3, 50)
    node.start()

    def shown() -> str:
        return ask(node.settings.stager_socket, GetMetrics(), expect=MetricsText).text

    loader = DataLoader(StagedDataset(url, fields=("__key__",)), 1, pacing=Pacing(interval_s=0.05))
    with closing(iter(loader)) as batches:
        for _ in range(5):
            next(batches)
        label = f'{{dataset="{url}",rank="0"}}'
        assert eventually(lambda: f"forebay_rank_step_count{label} 5.0" in shown())
        assert f"forebay_rank_runway_seconds{label}" in shown()
    assert eventually(lambda: "forebay_rank_step_count{" not in shown())
