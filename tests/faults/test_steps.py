"""S1, S3, S4, S5: a daemon that dies, or whose disk fails or is full, at each named step of a fetch."""

from __future__ import annotations

import pytest

from forebay.core.channel import Channel
from forebay.core.errors import DaemonUnavailable, ForebayError
from forebay.core.failpoint import FETCH_POINTS, VARIABLE
from forebay.core.protocol import Dataset, Done, ReleaseShard
from tests.conftest import Node, eventually, shard_bytes, stats_below
from tests.integration.test_stager import MakeDataset, read_shard, register, stage

KB = 1000
# One GET, then ranges of 40 kB; with 300 kB of capacity the later ones push out the first.
SAMPLES = [3, 40, 4, 41, 5]
# Steps behind which no call into the file system stands that could fail.
NO_IO = ("fetch.kept", "evict.aside", "evict.forgotten")


@pytest.fixture
def url(node: Node, make_dataset: MakeDataset) -> str:
    node.set(
        FOREBAY_TRANSFER__WHOLE_BYTES="50KB",
        FOREBAY_TRANSFER__RANGE_BYTES="40KB",
        FOREBAY_STAGER__CAPACITY="300KB",
        FOREBAY_STAGER__STALL_S="5",
    )
    return make_dataset(SAMPLES, 2 * KB)


def read_all(channel: Channel, dataset: Dataset) -> None:
    """Each shard's bytes are the object's."""
    for shard, samples in enumerate(SAMPLES):
        assert read_shard(channel, dataset, shard) == shard_bytes(shard, samples, 2 * KB)
        channel.request(ReleaseShard(dataset.id, shard), expect=Done)


def miscounted(node: Node) -> str | None:
    """What the daemon counts is what lies there, and nothing else does.

    A file system may give a file one more block for its own records, when it is written back.
    """
    status, found = node.stager(), stats_below(node.objects)
    blocks_bytes = sum(stat.st_blocks * 512 for stat in found.values())
    more_bytes = blocks_bytes - status.held_bytes
    if status.shards == len(found) and 0 <= more_bytes <= 4096 * len(found) and status.held_bytes <= 300 * KB:
        return None
    there = ", ".join(f"{path.name} {stat.st_blocks * 512}" for path, stat in found.items())
    return f"{status.shards} shards of {status.held_bytes} bytes are counted, there are {there}"


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("point", FETCH_POINTS)
def test_kill_9_at_each_step(node: Node, url: str, point: str, passes: int):
    """After a new start everything is right, and nothing is left over or counted twice."""
    node.set(**{VARIABLE: f"{point}=kill@{passes}"})
    daemon = node.start()
    with node.connect() as channel, pytest.raises(DaemonUnavailable):
        read_all(channel, register(channel, url))
        stage(channel, register(channel, url))
    assert daemon.wait(timeout=10) == -9
    node.set(**{VARIABLE: ""})
    node.start()
    with node.connect() as channel:
        read_all(channel, register(channel, url))
    assert eventually(lambda: not miscounted(node)), miscounted(node)


@pytest.mark.parametrize("fault", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("point", [p for p in FETCH_POINTS if p not in NO_IO])
def test_a_full_or_failing_disk_at_each_step_is_got_over(node: Node, url: str, point: str, fault: str):
    """One failure is gone around: elsewhere, in memory, or a second try; the trainer sees only bytes."""
    node.set(**{VARIABLE: f"{point}=error:{fault}@1"})
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        read_all(channel, dataset)
        read_all(channel, dataset)
    assert eventually(lambda: not miscounted(node)), miscounted(node)


@pytest.mark.parametrize("fault", ["ENOSPC", "EIO", "EDQUOT"])
@pytest.mark.parametrize("point", ["landing.begun", "landing.written", "landing.noted"])
def test_a_disk_that_stays_full_is_an_error_in_bounded_time(node: Node, url: str, point: str, fault: str):
    """S6: with no memory to go to, the error says what and where; nothing of the shard stays."""
    node.set(
        **{VARIABLE: f"{point}=error:{fault}"}, FOREBAY_STAGER__OVERFLOW="0", FOREBAY_STAGER__WAIT_S="20"
    )
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        with pytest.raises(ForebayError) as caught:
            read_all(channel, dataset)
    assert str(node.home) in str(caught.value)
    assert not stats_below(node.objects) and node.stager().held_bytes == 0


@pytest.mark.parametrize("point", ["landing.begun", "landing.written", "landing.noted"])
def test_a_slow_step_delays_and_no_more(node: Node, url: str, point: str):
    node.set(**{VARIABLE: f"{point}=delay:1@1"})
    node.start()
    with node.connect() as channel:
        read_all(channel, register(channel, url))
    assert not miscounted(node)
