"""S8: nothing that a source does is ever served or kept wrong, and nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import obstore
import pytest

from forebay.benchmarks.seaweed import S3Server
from forebay.core.errors import ForebayError
from forebay.core.protocol import Done, ReleaseShard
from tests.conftest import Node, shard_bytes
from tests.faults.proxy import Proxy, faulty_proxy
from tests.integration.test_stager import MakeDataset, read_shard, register, stage

KB = 1000


@pytest.fixture
def proxy(s3: S3Server, node: Node) -> Iterator[Proxy]:
    """The node's way to S3: ranges of 40 kB, four tries of a second each."""
    with faulty_proxy(s3.endpoint) as found:
        node.set(
            AWS_ENDPOINT_URL=found.endpoint,
            FOREBAY_TRANSFER__WHOLE_BYTES="50KB",
            FOREBAY_TRANSFER__RANGE_BYTES="40KB",
            FOREBAY_TRANSFER__ATTEMPT_TIMEOUT_S="1",
        )
        yield found


PASSING = ["short", "reset", "500", "503", "429", "stall", "drip", "lie"]


@pytest.mark.parametrize("samples", [3, 40])
@pytest.mark.parametrize("fault", [*PASSING, "flip"])
def test_what_passes_is_got_over(
    proxy: Proxy, node: Node, make_dataset: MakeDataset, fault: str, samples: int
):
    """Whole objects and ranges: the bytes are right in the end, and nothing else was ever there."""
    url = make_dataset([samples], 2 * KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        proxy.faults = [fault]
        assert read_shard(channel, dataset, 0) == shard_bytes(0, samples, 2 * KB)
    assert not list(node.objects.rglob(".forebay-*"))


@pytest.mark.parametrize("samples", [3, 40])
@pytest.mark.parametrize("fault", ["short", "500", "stall", "lie", "redirect", "404", "403"])
def test_what_stays_is_an_error_that_names_it_and_leaves_nothing_to_open(
    proxy: Proxy, node: Node, make_dataset: MakeDataset, fault: str, samples: int
):
    """F23, S6: bounded in time, typed, and well again when the source is."""
    url = make_dataset([samples], 2 * KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        proxy.always = fault
        began_at = time.monotonic()
        with pytest.raises(ForebayError, match=r"shard-000\.tar"):
            read_shard(channel, dataset, 0)
        assert time.monotonic() - began_at < 45
        assert node.stager().shards == 0 == node.stager().held_bytes
        assert not [p for p in node.objects.rglob("*") if p.is_file() and not p.name.startswith(".")]
        proxy.always = None
        assert read_shard(channel, dataset, 0) == shard_bytes(0, samples, 2 * KB)


def test_wrong_bytes_that_stay_are_named_with_both_digests(
    proxy: Proxy, node: Node, make_dataset: MakeDataset
):
    """F23: expected and found, after bounded tries."""
    url = make_dataset([3], 2 * KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        proxy.always, proxy.asked = "flip", 0
        with pytest.raises(ForebayError, match=r"MD5 [0-9a-f]{32} came, the store promised [0-9a-f]{32}"):
            read_shard(channel, dataset, 0)
        assert proxy.asked == node.settings.transfer.attempts
    assert node.stager().shards == 0


def test_an_object_replaced_between_two_ranges_is_never_spliced(
    proxy: Proxy, node: Node, make_dataset: MakeDataset, s3: S3Server, prefix: str
):
    """F8, F27: same key, same size, in the middle of a transfer by ranges."""
    url = make_dataset([60], 2 * KB)
    node.set(FOREBAY_SOURCE=f'[{{"url":"s3://{s3.bucket}","concurrency":1}}]')
    node.start()
    new = shard_bytes(5, 60, 2 * KB)
    with node.connect() as channel:
        dataset = register(channel, url)

        def replace(asked: int) -> None:
            if asked == 2:
                obstore.put(s3.store(), f"{prefix}/shard-000.tar", new, use_multipart=False)

        proxy.on_get, proxy.asked = replace, 0
        with pytest.raises(ForebayError) as caught:
            read_shard(channel, dataset, 0)
        assert caught.value.code == "object_changed"
        proxy.on_get = lambda asked: None
        assert not [p for p in node.objects.rglob("*") if p.is_file()]
        assert read_shard(channel, register(channel, url), 0) == new


def test_a_server_without_etags_in_its_answers_is_read(proxy: Proxy, node: Node, make_dataset: MakeDataset):
    url = make_dataset([3, 40], 2 * KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        proxy.always = "no-etag"
        for shard, samples in enumerate([3, 40]):
            assert read_shard(channel, dataset, shard) == shard_bytes(shard, samples, 2 * KB)


def test_a_throttled_burst_ends_in_a_complete_job(proxy: Proxy, node: Node, make_dataset: MakeDataset):
    """F9: 503 for a while, then well: everything comes, and the source was not stormed."""
    url = make_dataset([3] * 40, 2 * KB)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        # All of them meet the first request: nothing is known of the source, so it goes alone.
        proxy.faults, proxy.asked = ["503"] * 6, 0
        job = stage(channel, dataset)
        assert (job.state, job.shards_done) == ("done", 40)
        assert proxy.asked <= 6 + 40 + 5
        (source,) = node.stager().sources
        assert source.throttled >= 1
        for shard in range(40):
            assert read_shard(channel, dataset, shard) == shard_bytes(shard, 3, 2 * KB)
            channel.request(ReleaseShard(dataset.id, shard), expect=Done)


def test_kill_9_in_a_large_shard_goes_on_where_it_was(proxy: Proxy, node: Node, make_dataset: MakeDataset):
    """A shard of many ranges is not fetched again from its beginning."""
    url = make_dataset([400], 2 * KB)
    node.set(FOREBAY_TRANSFER__ATTEMPTS="1")
    node.start()
    with node.connect() as channel:
        dataset = register(channel, url)
        proxy.faults = [None] * 10
        proxy.always = "stall"
        with pytest.raises(ForebayError):
            read_shard(channel, dataset, 0)
        node.kill()
    proxy.faults, proxy.always, proxy.asked = [], None, 0
    node.start()
    with node.connect() as channel:
        assert read_shard(channel, register(channel, url), 0) == shard_bytes(0, 400, 2 * KB)
    ranges = -(-dataset.size_bytes // 40_000)
    assert proxy.asked <= ranges - 5
