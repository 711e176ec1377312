"""Batches made by processes: the same as by threads, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.core.errors import FormatError, InvalidRequest, WorkerLost
from forebay.loaders import DataLoader, Padded, StagedDataset
from tests.conftest import Node, eventually

MakeDataset = Callable[[list[int], int], str]
SHARDS = [7, 1, 0, 23, 12, 5, 9, 30]


def mixed(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of every kind that a batch can hold."""
    key, raw = sample
    number = int(key[-4:])
    return key, raw, torch.arange(number % 3), np.float32(number), {"n": number}, torch.tensor(number > 5)


def fails_at_five(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    if sample[0].endswith("0005"):
        raise ValueError("five")
    return sample


def dies_at_five(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    if sample[0].endswith("0005"):
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def waits_for_ever(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    if sample[0] == "000-0002":
        # At once, whatever the other process writes.
        os.write(1, b"waits\n")
        threading.Event().wait()
    return sample


def loader(url: str, workers: Any, transform: Any = mixed, **options: Any) -> DataLoader:
    dataset = StagedDataset(
        url,
        fields=("__key__", "bin"),
        decode={"bin": "array"},
        transform=transform,
        **{name: options.pop(name) for name in ("format", "on_error", "cache_dir") if name in options},
    )
    known = {"batch_size": 4, "shuffle": True, "seed": 5, "shuffle_block": 3, "workers": workers}
    return DataLoader(dataset, **{**known, **options})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


@pytest.mark.parametrize("workers", ["process", "fork"])
def test_batches_are_those_of_threads_and_of_no_daemon(
    node: Node, make_dataset: MakeDataset, workers: str, monkeypatch: pytest.MonkeyPatch
):
    """L3 and L5: bit for bit, over epochs, after a resume, with batches that the caller keeps."""
    # Other tests of this process leave idle threads behind; a script has none.
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    url = make_dataset(SHARDS, 500)
    alone = loader(url, "thread", cache_dir=node.home / "cache")
    without = [list(alone) for _ in range(2)]
    node.start()
    with_threads = loader(url, "thread")
    made = loader(url, workers)
    for expected in without:
        batches = list(made)
        assert same(batches, list(with_threads)) and same(batches, expected)
    running = iter(made)
    seen = [next(running) for _ in range(5)]
    resumed = loader(url, "thread")
    resumed.load_state_dict(made.state_dict())
    rest = list(resumed)
    assert same(seen + rest, seen + list(running))
    again = loader(url, workers, num_workers=3)
    again.load_state_dict(resumed.state_dict())
    assert same(list(again), list(resumed))
    assert eventually(lambda: node.stager().leased_bytes == 0)


@pytest.mark.parametrize("collate", [None, Padded()])
def test_formats_without_transform_and_collation_of_its_own(node: Node, tmp_path: Path, collate: Any):
    """One sample a file: each is leased by the child, for its batch alone."""
    (tmp_path / "files").mkdir()
    for number in range(20):
        (tmp_path / "files" / f"{number:02d}.bin").write_bytes(bytes([number]) * 70_000)
    node.start()
    made = [
        list(
            DataLoader(
                StagedDataset(str(tmp_path / "files"), fields=("bin",), format="folder", decode="array"),
                4,
                shuffle=True,
                workers=workers,
                collate_fn=collate,
            )
        )
        for workers in ("thread", "process")
    ]
    assert same(*made) and made[0][0][0].shape == (4, 70_000)
    assert eventually(lambda: node.stager().leased_bytes == 0)


def test_memory_is_used_again_and_never_under_a_batch_that_is_held(node: Node, make_dataset: MakeDataset):
    url = make_dataset([64] * 4, 20_000)
    node.start()
    made = loader(url, "process", None, num_workers=1)
    held, places = [], set()
    for _, raw in made:
        if len(held) < 5:
            held.append((raw, raw.clone()))
        places.add(raw.data_ptr())
    assert all(torch.equal(raw, copy) for raw, copy in held)
    assert len(places) < 20 < 64


def test_what_a_transform_raises_arrives_and_the_next_pass_goes_on(node: Node, make_dataset: MakeDataset):
    url = make_dataset([8] * 2, 50)
    node.start()
    made = loader(url, "process", fails_at_five)
    for _ in range(2):
        with pytest.raises(ValueError, match="five") as caught:
            list(made)
        assert any("-0005' of s3://" in note for note in caught.value.__notes__)
    lenient = loader(url, "process", fails_at_five, on_error="skip")
    assert sum(len(keys) for keys, _ in lenient) == 14 and lenient.stats.failed == 2
    wrong = StagedDataset(url, fields=("id",), decode="int")
    with pytest.raises(FormatError, match=r"'id' of sample '000-0000' in .* cannot be decoded"):
        list(DataLoader(wrong, 2, workers="process"))


def test_a_process_that_is_killed_is_named_and_replaced(node: Node, make_dataset: MakeDataset):
    url = make_dataset([8] * 2, 50)
    node.start()
    made = loader(url, "process", dies_at_five, shuffle=False)
    with pytest.raises(WorkerLost, match=r"worker process \d+ is gone \(killed by SIGKILL\)"):
        list(made)
    first = next(iter(made))
    assert first[0] == ["000-0000", "000-0001", "000-0002", "000-0003"]
    assert eventually(lambda: node.stager().leased_bytes == 0)


def test_what_cannot_be_sent_is_refused_at_once(node: Node, make_dataset: MakeDataset):
    url = make_dataset([8], 50)
    node.start()
    with pytest.raises(InvalidRequest, match="cannot be sent to a process"):
        loader(url, "process", lambda sample: sample)
    with pytest.raises(InvalidRequest, match="thread, process or fork"):
        loader(url, "processes")
    held = threading.Event()
    other = threading.Thread(target=held.wait, name="a-thread-of-the-script")
    other.start()
    try:
        with pytest.raises(InvalidRequest, match=r"other threads run .*a-thread-of-the-script"):
            loader(url, "fork")
    finally:
        held.set()
        other.join()


def test_an_abandoned_pass_frees_its_shards_and_the_loader_its_processes(
    node: Node, make_dataset: MakeDataset
):
    url = make_dataset(SHARDS, 50)
    node.start()
    before = children()
    made = loader(url, "process")
    for _ in range(3):
        running = iter(made)
        next(running)
        running.close()
        assert eventually(lambda: node.stager().leased_bytes == 0)
    assert len(children() - before) >= 2
    del made, running
    assert eventually(lambda: {pid for pid in children() - before if not _tracks(pid)} == set())


def _tracks(pid: int) -> bool:
    """multiprocessing keeps one helper for all."""
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_small_tier_is_enough_for_children_that_map_its_shards_too(node: Node, make_dataset: MakeDataset):
    """A child that is idle holds no lease that the order is past."""
    url = make_dataset([10] * 12, 2000)
    node.set(FOREBAY_STAGER__CAPACITY="250KB")
    node.start()
    made = loader(url, "process", None, num_workers=3)
    for _ in range(2):
        assert sum(len(keys) for keys, _ in made) == 120


def test_processes_outlive_a_restart_of_stagerd(node: Node, make_dataset: MakeDataset):
    url = make_dataset(SHARDS * 2, 2000)
    node.start()
    expected = list(loader(url, "thread"))
    running = iter(loader(url, "process"))
    seen = [next(running) for _ in range(3)]
    node.kill()
    node.start()
    assert same(seen + list(running), expected)


SCRIPT = """
import faulthandler, os, sys, tests.integration.test_workers as here
if __name__ == "__main__":
    # Where it hangs, if it does.
    faulthandler.dump_traceback_later(30)
    loader = here.loader(sys.argv[1], sys.argv[2], here.waits_for_ever, shuffle=False, num_workers=1,
        batch_size=1)
    for batch in loader:
        os.write(1, (" ".join(map(str, here.children())) + "\n").encode())
"""


@pytest.mark.parametrize(
    ("workers", "end"),
    [
        ("process", signal.SIGINT),
        ("process", signal.SIGKILL),
        ("fork", signal.SIGINT),
        ("fork", signal.SIGKILL),
        ("thread", signal.SIGKILL),
    ],
)
def test_nothing_is_left_of_a_script_that_is_ended(
    node: Node, make_dataset: MakeDataset, workers: str, end: signal.Signals
):
    """F20: Ctrl-C or kill -9 while a transform hangs; the next run starts at once."""
    url = make_dataset([8] * 2, 50)
    node.start()
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, url, workers], stdout=subprocess.PIPE, start_new_session=True
    )
    assert run.stdout
    lines = iter(run.stdout.readline, b"")
    family = (
        {int(pid) for line in lines if line != b"waits\n" for pid in line.split()}
        if workers == "never"
        else set()
    )
    for line in lines:
        if line == b"waits\n":
            break
        family |= set(map(int, line.split()))
    # Ctrl-C reaches the whole group of a terminal.
    os.killpg(run.pid, end) if end == signal.SIGINT else run.send_signal(end)
    assert run.wait(timeout=60) != 0
    run.stdout.close()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))
    assert eventually(lambda: node.stager().leased_bytes == 0)
    assert len(list(loader(url, "thread"))) == 4


FORKS = """
import os, sys
from forebay.core.errors import WorkerLost
from forebay.loaders import DataLoader, StagedDataset
cache = {"cache_dir": sys.argv[2]} if len(sys.argv) > 2 else {}
loader = DataLoader(StagedDataset(sys.argv[1], fields=("__key__",), **cache), 4)
running = iter(loader)
seen = [next(running)[0]]
child = os.fork()
if not child:
    try:
        next(running)
    except WorkerLost as err:
        print(err, flush=True)
    del running
    # A pass of its own works, and ends as any program does.
    print(sum(len(keys) for keys, in loader), flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
seen += [keys for keys, in running]
print(sum(map(len, seen)), flush=True)
"""


@pytest.mark.parametrize("daemon", [True, False])
def test_a_forked_copy_is_told_so_and_harms_nothing(node: Node, make_dataset: MakeDataset, daemon: bool):
    """The copy has none of the threads; what it lets go of stays open here."""
    url = make_dataset(SHARDS, 50)
    if daemon:
        node.start()
    arguments = [url] if daemon else [url, str(node.home / "cache")]
    run = subprocess.run(
        [sys.executable, "-c", FORKS, *arguments], capture_output=True, text=True, timeout=90, check=False
    )
    assert run.returncode == 0, run.stderr
    told, *counts = run.stdout.splitlines()
    assert "its threads are not in this copy" in told and counts == ["87", "87"]
