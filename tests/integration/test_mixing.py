"""A mixture read through a real stagerd: several formats, any number of ranks, resumed exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.core.errors import InvalidRequest, StateMismatch
from forebay.loaders import DataLoader, Mixture, StagedDataset
from forebay.loaders.formats import Tokens
from tests.conftest import Node, eventually
from tests.integration.test_workers import same

MakeDataset = Callable[[list[int], int], str]


def named(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    return (f"window-{sample[0][0].item()}",)


@pytest.fixture
def parts(node: Node, make_dataset: MakeDataset, tmp_path: Path) -> list[tuple[StagedDataset, float]]:
    """Keys of WebDataset shards, and windows of ids whose first id names them."""
    folder = tmp_path / "ids"
    folder.mkdir()
    for shard in range(3):
        np.arange(shard * 100, shard * 100 + 100, dtype=np.uint16).tofile(folder / f"{shard}.bin")
    node.start()
    ids = StagedDataset(str(folder), fields=("tokens",), format=Tokens(10, extra=0), transform=named)
    return [(StagedDataset(make_dataset([30, 5, 0, 40], 50), fields=("__key__",)), 3), (ids, 1)]


def keys_of(batches: Any) -> list[list[str]]:
    return [keys for (keys,) in batches]


def flat(batches: list[list[str]]) -> list[str]:
    return [key for batch in batches for key in batch]


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_mixture_is_one_sequence_for_any_ranks_and_resumes(
    node: Node, parts: list[tuple[StagedDataset, float]], workers: Any
):
    def loader(**options: Any) -> DataLoader:
        known: dict[str, Any] = {"batch_size": 6, "shuffle": True, "seed": 3, "shuffle_block": 2}
        return DataLoader(Mixture(parts, until="all"), **{**known, **options})

    whole = loader(workers=workers)
    lengths, epochs = [], []
    for _ in range(2):
        lengths.append(len(whole))
        epochs.append(keys_of(whole))
    assert lengths == [len(epoch) for epoch in epochs]
    assert epochs[0] != epochs[1]
    names = set(flat(epochs[0]))
    assert len([name for name in names if name.startswith("window-")]) == 30 and len(names) == 105
    halves = [loader(batch_size=3, rank=rank, world_size=2) for rank in range(2)]
    first = [keys_of(half) for half in halves]
    assert [a + b for a, b in zip(*first, strict=True)][:-1] == epochs[0][:-1]
    running = loader()
    iterator = iter(running)
    seen = [next(iterator)[0] for _ in range(7)]
    iterator.close()
    saved = json.dumps(running.state_dict())
    assert len(saved) < 500
    for half in halves:
        half.load_state_dict(json.loads(saved))
    rest = [a + b for a, b in zip(*(keys_of(half) for half in halves), strict=True)]
    assert flat(seen + rest)[: len(flat(epochs[0]))] == flat(epochs[0])
    assert eventually(lambda: node.stager().leased_bytes == 0)


def test_a_state_of_another_mixture_is_refused(node: Node, parts: list[tuple[StagedDataset, float]]):
    state = DataLoader(Mixture(parts), 4).state_dict()
    (one, _), other = parts
    with pytest.raises(StateMismatch, match="format"):
        DataLoader(Mixture([(one, 2), other]), 4).load_state_dict(state)
    with pytest.raises(InvalidRequest, match="above 0"):
        Mixture([(one, 0), other])
    with pytest.raises(InvalidRequest, match="until"):
        Mixture(parts, until="never")  # type: ignore[arg-type]
    two = StagedDataset(one._request.url, fields=("__key__", "id"))  # type: ignore[union-attr]
    with pytest.raises(InvalidRequest, match="differ in fields: 2, 1"):
        Mixture([(two, 1), other])
    said = DataLoader(Mixture(parts, until=100), 4).explain()
    assert "2 datasets in shares of 75.0%, 25.0%, until 100" in said


def test_alike_datasets_are_gathered_without_a_detour(node: Node, make_dataset: MakeDataset, tmp_path: Path):
    """Zero-copy columns, as of one dataset; a part that comes round many times while its shard is in use."""
    (tmp_path / "one.bin").write_bytes(np.arange(50, dtype=np.uint16).tobytes())
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "many.bin").write_bytes(np.arange(1000, 6000, dtype=np.uint16).tobytes())
    (tmp_path / "one").mkdir()
    (tmp_path / "one.bin").rename(tmp_path / "one" / "one.bin")
    node.start()
    pair = [
        (StagedDataset(str(tmp_path / name), fields=("tokens",), format=Tokens(10, extra=0)), 1.0)
        for name in ("one", "many")
    ]
    mixture = Mixture(pair, until=1000)
    batches = [tokens for (tokens,) in DataLoader(mixture, 100, shuffle=True)]
    assert [tokens.shape for tokens in batches] == [(100, 10)] * 10
    firsts = torch.cat(batches)[:, 0]
    assert set(firsts[firsts < 1000].tolist()) == {0, 10, 20, 30, 40}
    assert 420 < int((firsts < 1000).sum()) < 580
    assert same(batches, [tokens for (tokens,) in DataLoader(mixture, 100, shuffle=True, workers="process")])
    assert eventually(lambda: node.stager().leased_bytes == 0)
