"""The loader with a real stagerd: every rank, every batch, through restarts and without a daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch

from forebay.benchmarks.seaweed import S3Server
from forebay.core.errors import FormatError, InvalidRequest, MissingField, StateMismatch, WorkingSetTooLarge
from forebay.core.service import own_directory
from forebay.core.spawn import spawn
from forebay.loaders import DataLoader, StagedDataset
from tests.conftest import Node, eventually, shard_bytes, tar_bytes

MakeDataset = Callable[[list[int], int], str]
SHARDS = [7, 1, 0, 23, 12, 5, 9, 30]
ALL = sorted(f"{shard:03d}-{i:04d}" for shard, count in enumerate(SHARDS) for i in range(count))


def loader(url: str, **options: Any) -> DataLoader:
    dataset = StagedDataset(url, fields=("__key__", "id"), decode={"id": "text"})
    return DataLoader(dataset, **{"batch_size": 4, "shuffle": True, "seed": 5, "shuffle_block": 3, **options})


def keys_of(batches: Any) -> list[list[str]]:
    found = []
    for keys, ids in batches:
        assert keys == ids
        found.append(keys)
    return found


def flat(batches: list[list[str]]) -> list[str]:
    return [key for batch in batches for key in batch]


@pytest.mark.parametrize("world_size", [1, 2, 3, 11])
def test_ranks_share_an_epoch_evenly(node: Node, make_dataset: MakeDataset, world_size: int):
    """L1, L2 and F15: more ranks than shards too; what is repeated is counted."""
    url = make_dataset(SHARDS, 50)
    node.start()
    loaders = [loader(url, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [keys_of(one) for one in loaders]
    assert len({len(found) for found in batches}) == 1
    seen = Counter(key for found in batches for key in flat(found))
    assert sorted(seen) == ALL
    assert seen.total() - len(ALL) == sum(one.stats.padded for one in loaders)
    assert sum(one.stats.samples for one in loaders) == len(ALL)
    assert all(len(one) == len(batches[0]) for one in loaders)


def test_order_is_the_same_for_any_ranks_threads_and_cache(node: Node, make_dataset: MakeDataset):
    """L3 and L5: hot or cold, one thread or four, one rank or two."""
    url = make_dataset(SHARDS, 50)
    node.start()
    one = keys_of(loader(url, batch_size=8, num_workers=1))
    again = keys_of(loader(url, batch_size=8, num_workers=4, prefetch=1))
    halves = [keys_of(loader(url, batch_size=4, rank=rank, world_size=2)) for rank in range(2)]
    assert one == again
    assert [a + b for a, b in zip(*halves, strict=True)][:-1] == one[:-1]
    epochs = loader(url)
    first, second = keys_of(epochs), keys_of(epochs)
    assert first != second and sorted(flat(first)) == sorted(flat(second)) == ALL


@pytest.mark.parametrize("stop", [0, 1, 9, 21])
def test_resume_yields_exactly_what_was_not_seen(node: Node, make_dataset: MakeDataset, stop: int):
    """F19 and L4: also onto another number of ranks."""
    url = make_dataset(SHARDS, 50)
    node.start()
    whole = keys_of(loader(url))
    running = loader(url)
    iterator = iter(running)
    seen = [next(iterator)[0] for _ in range(stop)]
    state = json.loads(json.dumps(running.state_dict()))
    iterator.close()
    resumed = loader(url)
    resumed.load_state_dict(state)
    assert seen + keys_of(resumed) == whole
    halves = [loader(url, batch_size=2, rank=rank, world_size=2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    together = [a + b for a, b in zip(*(keys_of(half) for half in halves), strict=True)]
    # 87 samples do not divide by two: the last batch repeats one.
    assert flat(seen + together)[: len(ALL)] == flat(whole)


def test_the_epoch_is_part_of_the_state(node: Node, make_dataset: MakeDataset):
    """F21: no permutation comes twice after a resume."""
    url = make_dataset(SHARDS, 50)
    node.start()
    reference = loader(url)
    epochs = [keys_of(reference) for _ in range(3)]
    running = loader(url)
    keys_of(running)
    iterator = iter(running)
    next(iterator)
    state = running.state_dict()
    iterator.close()
    resumed = loader(url)
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert keys_of(resumed) == epochs[1][1:]
    assert keys_of(resumed) == epochs[2]
    resumed.set_epoch(0)
    assert keys_of(resumed) == epochs[0]


def test_three_epochs_with_other_ranks_each(node: Node, make_dataset: MakeDataset):
    """L3 and L4: a job that is started again with more or fewer ranks goes on in one sequence."""
    url = make_dataset(SHARDS, 50)
    node.start()
    whole = loader(url, batch_size=6)
    epochs = [flat(keys_of(whole)) for _ in range(3)]
    state = loader(url).state_dict()
    for epoch, world_size in enumerate([3, 1, 2]):
        ranks = [
            loader(url, batch_size=6 // world_size, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.load_state_dict(state)
        together = zip(*(keys_of(rank) for rank in ranks), strict=True)
        assert [key for slices in together for keys in slices for key in keys][: len(ALL)] == epochs[epoch]
        states = [rank.state_dict() for rank in ranks]
        assert all(other == states[0] for other in states) and len(json.dumps(states[0])) < 400
        state = states[0]


def test_tqdm_knows_how_long_it_takes(node: Node, make_dataset: MakeDataset):
    from tqdm import tqdm

    url = make_dataset(SHARDS, 50)
    node.start()
    found = tqdm(loader(url), disable=True)
    assert found.total == len(list(found)) == 22


def test_a_state_that_does_not_fit_is_refused_with_the_reason(node: Node, make_dataset: MakeDataset):
    """F19."""
    url = make_dataset(SHARDS, 50)
    node.start()
    state = loader(url).state_dict()
    for wrong in ({"seed": 6}, {"shuffle_block": 4}, {"shuffle": False}):
        with pytest.raises(StateMismatch, match="the saved state has"):
            loader(url, **wrong).load_state_dict(state)
    with pytest.raises(StateMismatch, match="fingerprint"):
        loader(url).load_state_dict({**state, "fingerprint": "other"})
    with pytest.raises(StateMismatch, match="lacks"):
        loader(url).load_state_dict({"epoch": 1})  # type: ignore[typeddict-item]


def test_a_loader_outlives_a_restart_of_stagerd(node: Node, make_dataset: MakeDataset):
    """F3: kill -9 of the daemon in mid-epoch; the training script notices nothing."""
    url = make_dataset(SHARDS * 3, 2000)
    node.start()
    expected = keys_of(loader(url))
    running = iter(loader(url))
    seen = [next(running)[0] for _ in range(3)]
    node.kill()
    node.start()
    assert seen + keys_of(running) == expected


def test_a_pass_that_begins_while_stagerd_is_away_waits_for_it(
    node: Node, make_dataset: MakeDataset, caplog: pytest.LogCaptureFixture
):
    """Of the loader that it served, and of another one: none goes its own way for good."""
    url = make_dataset(SHARDS, 200)
    node.start()
    made = loader(url, shuffle=False)
    expected = keys_of(made)
    for begin in (lambda: keys_of(made), lambda: keys_of(loader(url, shuffle=False))):
        node.kill()
        with ThreadPoolExecutor(1) as pool:
            caplog.clear()
            later = pool.submit(begin)
            assert eventually(lambda: "connecting again" in caplog.text)
            node.start()
            assert later.result(30) == expected
    assert "private" not in caplog.text


def test_smaller_than_the_dataset_is_enough(node: Node, make_dataset: MakeDataset):
    url = make_dataset([10] * 12, 2000)
    node.set(FOREBAY_STAGER__CAPACITY="250KB")
    node.start()
    found = loader(url)
    for _ in range(3):
        assert len(flat(keys_of(found))) == 120
    status = node.stager()
    assert status.evictions > 0 and status.held_bytes <= 250_000
    assert eventually(lambda: node.stager().leased_bytes == 0)


def test_a_block_that_cannot_fit_says_what_to_do(node: Node, make_dataset: MakeDataset):
    """F2."""
    url = make_dataset([10] * 12, 2000)
    node.set(FOREBAY_STAGER__CAPACITY="100KB")
    node.start()
    with pytest.raises(WorkingSetTooLarge, match="shuffle_block"):
        next(iter(loader(url)))


def test_decoders_and_columns(node: Node, s3: S3Server, prefix: str):
    import io

    import numpy as np
    from PIL import Image

    members = []
    for sample in range(4):
        picture, array = io.BytesIO(), io.BytesIO()
        Image.fromarray(np.full((5, 6, 3), sample, dtype=np.uint8)).save(picture, "PNG")
        np.save(array, np.arange(3) + sample)
        members += [
            (f"{sample}.png", picture.getvalue()),
            (f"{sample}.cls", str(sample).encode()),
            (f"{sample}.json", json.dumps({"n": sample}).encode()),
            (f"{sample}.npy", array.getvalue()),
            (f"{sample}.bin", bytes([sample]) * 8),
        ]
    obstore.put(s3.store(), f"{prefix}/a.tar", tar_bytes(members))
    node.start()
    fields = ("png", "cls", "json", "npy", "bin", "__key__")
    dataset = StagedDataset(s3.url(prefix), fields=fields, decode="auto")
    ((png, cls, obj, npy, raw, keys),) = DataLoader(dataset, 4)
    assert png.shape == (4, 3, 5, 6) and png.dtype == torch.uint8 and png[3].unique().tolist() == [3]
    assert cls.tolist() == [0, 1, 2, 3] and cls.dtype == torch.int64
    assert obj == [{"n": n} for n in range(4)] and npy[2].tolist() == [2, 3, 4]
    assert raw == [bytes([n]) * 8 for n in range(4)] and keys == ["0", "1", "2", "3"]
    dataset = StagedDataset(
        s3.url(prefix), fields=("bin", "cls"), decode={"bin": "array", "cls": lambda data: -int(data)}
    )
    ((array, negative),) = DataLoader(dataset, 4)
    assert array.shape == (4, 8) and array[3].tolist() == [3] * 8 and negative.tolist() == [0, -1, -2, -3]
    custom = DataLoader(
        StagedDataset(s3.url(prefix), fields=("cls",), decode="auto", transform=lambda s: (s[0] * 2,)),
        2,
        collate_fn=list,
    )
    assert list(custom) == [[(0,), (2,)], [(4,), (6,)]]


def test_errors_reach_the_training_loop_and_name_the_sample(node: Node, make_dataset: MakeDataset):
    url = make_dataset([3], 50)
    node.start()
    with pytest.raises(
        MissingField, match=r"'000-0000' in s3://.*shard-000.tar has no field 'png'; it has bin, id"
    ):
        list(DataLoader(StagedDataset(url, fields=("png",)), 2))
    with pytest.raises(FormatError, match=r"'id' of sample '000-0000' in .* cannot be decoded: ValueError"):
        list(DataLoader(StagedDataset(url, fields=("id",), decode="int"), 2))
    with pytest.raises(InvalidRequest, match="unknown decoder"):
        StagedDataset(url, fields=("id",), decode="nonsense")
    with pytest.raises(InvalidRequest, match="batch_size"):
        loader(url, batch_size=0)
    with pytest.raises(InvalidRequest, match="rank 2"):
        loader(url, rank=2, world_size=2)


def test_an_abandoned_iterator_frees_its_shards_and_threads(node: Node, make_dataset: MakeDataset):
    import threading

    url = make_dataset(SHARDS, 50)
    node.start()
    found = loader(url)
    before = threading.active_count()
    iterator = iter(found)
    next(iterator)
    iterator.close()
    assert eventually(lambda: node.stager().leased_bytes == 0)
    assert eventually(lambda: threading.active_count() <= before)
    assert sorted(flat(keys_of(found))) == ALL


def test_a_pass_that_is_left_early_does_not_come_again(node: Node, make_dataset: MakeDataset):
    """F21: trainers that count batches never see the end of a pass."""
    url = make_dataset(SHARDS, 50)
    node.start()
    reference = loader(url)
    epochs = [keys_of(reference) for _ in range(3)]
    counted = loader(url)
    for epoch in range(2):
        pairs = zip(range(len(counted)), counted, strict=False)
        assert keys_of(batch for _, batch in pairs) == epochs[epoch]
    counted.set_epoch(1)
    assert next(iter(counted))[0] == epochs[1][0]
    counted.set_epoch(1)
    assert keys_of(counted) == epochs[1]
    assert keys_of(counted) == epochs[2]


def test_without_a_daemon_a_private_one_serves(
    node: Node, make_dataset: MakeDataset, caplog: pytest.LogCaptureFixture
):
    """A laptop needs nothing; it is said once; batches are the same as with a daemon."""
    url = make_dataset(SHARDS, 50)
    cache = node.home / "cache"
    dataset = StagedDataset(url, fields=("__key__", "id"), decode={"id": "text"}, cache_dir=cache)
    alone = DataLoader(dataset, 4, shuffle=True, seed=5, shuffle_block=3)
    without = [keys_of(alone) for _ in range(2)]
    assert len([r for r in caplog.records if "no stagerd here" in r.message]) == 1
    node.start()
    with_daemon = loader(url)
    assert [keys_of(with_daemon) for _ in range(2)] == without


SCRIPT = """
import logging, os, signal, sys, tempfile
from forebay.loaders import DataLoader, StagedDataset
for batch in DataLoader(StagedDataset(sys.argv[1], fields=("__key__",)), 4):
    print(tempfile.gettempdir(), flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["die", "finish"])
def test_a_private_stagerd_and_its_cache_end_with_the_process(
    node: Node, make_dataset: MakeDataset, end: str, tmp_path: Path
):
    """F3 and F20: kill -9 in mid-epoch; nothing is left in memory, on disk or in /dev/shm."""
    url = make_dataset(SHARDS, 50)
    shm = set(os.listdir("/dev/shm"))
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, url, end],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == (-signal.SIGKILL if end == "die" else 0), run.stderr
    assert b"starting a private one" in run.stderr
    assert eventually(lambda: not list(tmp_path.glob("forebay-*")))
    assert set(os.listdir("/dev/shm")) == shm


def test_two_processes_with_one_cache_directory_fetch_once(node: Node, make_dataset: MakeDataset):
    """F6, on a laptop."""
    url = make_dataset([20] * 4, 500)
    script = SCRIPT.replace('fields=("__key__",)', 'fields=("__key__",), cache_dir=sys.argv[3]')
    cache = str(node.home / "cache")
    runs = [
        subprocess.Popen([sys.executable, "-c", script, url, "finish", cache], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert all(len(output.split()) == 20 for output in outputs)


def private_stagerd(home: Path) -> subprocess.Popen[bytes]:
    return spawn([sys.executable, "-m", "forebay.stager", "--home", str(home)], stdin=subprocess.PIPE)


def test_a_private_stagerd_ends_though_its_parent_lives(tmp_path: Path):
    """Told to, or because another has its directory; its standard input stays open in both."""
    first = private_stagerd(tmp_path)
    with own_directory(tmp_path / "other" / "stager"):
        assert private_stagerd(tmp_path / "other").returncode == 0
    first.terminate()
    assert first.wait(20) == 0


def test_a_file_tree_is_a_source_like_any_other(node: Node, tmp_path: Path):
    for shard, count in enumerate(SHARDS):
        (tmp_path / f"{shard}.tar").write_bytes(shard_bytes(shard, count))
    node.start()
    assert sorted(flat(keys_of(loader(str(tmp_path))))) == ALL
