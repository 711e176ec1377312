"""Other libraries' readers on what stagerd has staged: through fsspec, with nothing else changed."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import webdataset as wds

from forebay.benchmarks.jobs import register
from forebay.core.protocol import Register
from forebay.loaders.filesystem import ForebayFileSystem
from tests.conftest import Node, eventually, shard_bytes


@pytest.fixture
def fs(node: Node, tmp_path: Path) -> ForebayFileSystem:
    """Two tars and two Parquet files below `forebay://things`."""
    place = tmp_path / "d"
    (place / "deep").mkdir(parents=True)
    for number in range(2):
        (place / f"{number}.tar").write_bytes(shard_bytes(number, 3))
        pq.write_table(pa.table({"n": np.arange(5) + 10 * number}), place / f"deep/{number}.parquet")
    node.start()
    with node.connect() as channel:
        register(channel, Register(str(place), "raw", "things"))
    ForebayFileSystem.clear_instance_cache()
    return fsspec.filesystem("forebay")  # type: ignore[no-any-return]


def test_as_a_file_system(fs: ForebayFileSystem, node: Node, tmp_path: Path):
    assert sorted(fs.find("forebay://things")) == [
        "things/0.tar", "things/1.tar", "things/deep/0.parquet", "things/deep/1.parquet",
    ]  # fmt: skip
    assert fs.isdir("things/deep") and fs.isfile("things/0.tar") and not fs.exists("things/no")
    whole = shard_bytes(1, 3)
    assert fs.size("things/1.tar") == len(whole) and fs.cat("things/1.tar") == whole
    assert fs.cat_file("things/1.tar", 10, 30) == whole[10:30]
    with fsspec.open("forebay://things/1.tar") as file:
        assert node.stager().leased_bytes >= len(whole)
        file.seek(-100, 2)
        assert file.read() == whole[-100:]
    assert eventually(lambda: node.stager().leased_bytes == 0)
    assert node.stager().fetches == 1
    for wrong in ("forebay://things/no", "forebay://unknown/x"):
        with pytest.raises(FileNotFoundError):
            fsspec.open(wrong).open()
    with pytest.raises(NotImplementedError):
        fs.open("things/x", "wb")


def test_pyarrow_reads_through_it(fs: ForebayFileSystem):
    assert pq.read_table("things/deep/1.parquet", filesystem=fs)["n"].to_pylist() == [10, 11, 12, 13, 14]
    found = pyarrow.dataset.dataset("things/deep", filesystem=fs, format="parquet")
    assert found.count_rows() == 10


def _sum_of(path: str) -> int:
    with fsspec.open(path) as file:
        return int(pq.read_table(file)["n"].to_numpy().sum())


def test_forked_workers_have_connections_of_their_own(fs: ForebayFileSystem):
    paths = [f"forebay://things/deep/{number % 2}.parquet" for number in range(8)]
    expected = [_sum_of(path) for path in paths]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_sum_of, paths) == expected


def test_webdataset_reads_through_it(fs: ForebayFileSystem):
    urls = [f"forebay://things/{number}.tar" for number in range(2)]
    opened = ({"url": url, "stream": fsspec.open(url).open()} for url in urls)
    samples = list(wds.tariterators.group_by_keys(wds.tariterators.tar_file_expander(opened)))
    assert [sample["id"] for sample in samples] == [
        f"{shard:03d}-{number:04d}".encode() for shard in range(2) for number in range(3)
    ]
