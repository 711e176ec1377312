"""Datasets of every format through a real stagerd: listed, staged, indexed once, read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from PIL import Image

from forebay.core.errors import EmptyDataset, FormatError, StateMismatch
from forebay.loaders import DataLoader, Padded, Ragged, StagedDataset
from forebay.loaders.formats import Folder, Format, Megatron, Tokens, WebDataset
from tests.conftest import Node, shard_bytes, tar_bytes

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    return tmp_path / "d"


def batches(place: Path, fields: tuple[str, ...], format: str | Format, **options: Any) -> list[Any]:
    size = options.pop("batch_size", 4)
    order = {
        name: options.pop(name) for name in ("shuffle", "collate_fn", "rank", "world_size") if name in options
    }
    return list(DataLoader(StagedDataset(str(place), fields=fields, format=format, **options), size, **order))


def test_compressed_tars(node: Node, place: Path):
    pack: dict[str, Callable[[bytes], bytes]] = {
        "a.tar.gz": gzip.compress,
        "b.tgz": gzip.compress,
        "c.tar.zst": zstandard.ZstdCompressor().compress,
        "d.tar.bz2": bz2.compress,
        "e.tar": bytes,
    }
    for number, (name, packed) in enumerate(pack.items()):
        (place / name).write_bytes(packed(shard_bytes(number, 3)))
    node.start()
    found = [key for keys, ids in batches(place, ("__key__", "id"), "webdataset") for key in keys]
    assert found == [f"{shard:03d}-{sample:04d}" for shard in range(5) for sample in range(3)]


def test_a_compressed_tar_that_is_cut_off(node: Node, place: Path):
    (place / "a.tar.gz").write_bytes(gzip.compress(shard_bytes(0, 300))[:-50])
    node.start()
    with pytest.raises(FormatError, match=r"a\.tar\.gz is cut off"):
        batches(place, ("id",), "webdataset")


def test_parquet_columns_become_tensors(node: Node, place: Path):
    for shard in range(3):
        rows = range(shard * 5, shard * 5 + 5)
        table = pa.table(
            {
                "label": pa.array(rows, pa.int64()),
                "vector": pa.array([[float(n)] * 3 for n in rows], pa.list_(pa.float32(), 3)),
                "ids": [list(range(n % 4)) for n in rows],
                "text": [f"t{n}" for n in rows],
            }
        )
        pq.write_table(table, place / f"{shard}.parquet")
    node.start()
    fields = ("label", "vector", "ids", "text")
    first, *_, last = batches(place, fields, "parquet")
    assert first[0].tolist() == [0, 1, 2, 3] and first[1].shape == (4, 3) and first[1].dtype == torch.float32
    assert [ids.tolist() for ids in first[2]] == [[], [0], [0, 1], [0, 1, 2]]
    assert last[3] == ["t12", "t13", "t14"]
    shuffled = batches(place, fields, "parquet", shuffle=True)
    labels = torch.cat([label for label, *_ in shuffled]).tolist()
    assert labels != list(range(15)) and sorted(labels) == list(range(15))
    for label, vector, _, text in shuffled:
        assert vector[:, 0].tolist() == label.tolist() and text == [f"t{n}" for n in label.tolist()]
    padded, lengths = batches(place, ("ids",), "parquet", collate_fn=Padded(-1))[0][0]
    assert padded.tolist() == [[-1] * 3, [0, -1, -1], [0, 1, -1], [0, 1, 2]] and lengths.tolist() == [
        0,
        1,
        2,
        3,
    ]
    flat, offsets = batches(place, ("ids",), "parquet", collate_fn=Ragged())[0][0]
    assert flat.tolist() == [0, 0, 1, 0, 1, 2] and offsets.tolist() == [0, 0, 1, 3, 6]


def test_windows_of_tokens(node: Node, place: Path):
    np.arange(100, dtype=np.uint32).tofile(place / "a.bin")
    np.save(place / "b.npy", np.arange(100, 150, dtype=np.uint16))
    node.start()
    found = batches(place, ("tokens",), Tokens(length=8, extra=1, dtype="uint32"), batch_size=100)[0][0]
    assert found.dtype == torch.int64 and found.shape == (12 + 6, 9)
    assert found[12].tolist() == list(range(100, 109))
    parts = [
        batches(place, ("tokens",), Tokens(8, 1, "uint32"), shuffle=True, rank=rank, world_size=2)
        for rank in range(2)
    ]
    starts = sorted({int(row[0]) for part in parts for (tokens,) in part for row in tokens})
    assert starts == found[:, 0].tolist()


def test_megatrons_two_files(node: Node, place: Path):
    for name in ("text.bin", "text.idx"):
        shutil.copy(DATA / name, place)
    node.start()
    ((sequences,),) = batches(place, ("tokens",), "megatron", batch_size=9)
    assert sequences[0].tolist() == [0, 1, 2, 3, 4] and len(sequences) == 5
    loader = DataLoader(StagedDataset(str(place), fields=("tokens",), format=Megatron(length=6)), 9)
    assert len(loader) == 1
    (windows,) = next(iter(loader))
    assert windows.tolist() == [list(range(7)), list(range(6, 13))]


def test_mds_of_several_shards(node: Node, place: Path):
    for name in ("one.mds", "two.mds"):
        shutil.copy(DATA / name, place)
    (place / "index.json").write_text("{}")
    node.start()
    ((numbers, images, keys),) = batches(
        place, ("i", "png", "__key__"), "mds", decode={"png": "image"}, batch_size=9
    )
    assert numbers.tolist() == [0, -1, -2, -3, -4] and images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert len(set(keys)) == 5


def test_a_folder_of_images_by_every_number_of_ranks(node: Node, place: Path):
    for number in range(30):
        folder = place / ("cat" if number % 3 else "dog")
        folder.mkdir(exist_ok=True)
        to = io.BytesIO()
        Image.new("L", (4, 4), number).save(to, "PNG")
        (folder / f"{number:03d}.png").write_bytes(to.getvalue())
    (place / ".hidden").write_text("")
    node.start()
    format = Folder(classes=("cat", "dog"))
    seen: dict[int, int] = {}
    for world_size in (1, 3):
        for rank in range(world_size):
            for images, labels in batches(
                place, ("png", "cls"), format, decode={"png": "image"}, shuffle=True, rank=rank,
                world_size=world_size,
            ):  # fmt: skip
                for image, label in zip(images, labels, strict=True):
                    number = int(image.unique())
                    seen[number] = seen.get(number, 0) + 1
                    assert int(label) == (0 if number % 3 else 1)
        assert sorted(seen) == list(range(30)) and set(seen.values()) == {1}
        seen.clear()
    assert node.stager().leased_bytes == 0
    files = DataLoader(StagedDataset(str(place), fields=("file",), format="folder"), 7)
    assert len(files) == 5


def test_what_a_pass_will_do_is_said_before(node: Node, place: Path, capsys: pytest.CaptureFixture[str]):
    for shard in range(3):
        (place / f"{shard}.tar").write_bytes(shard_bytes(shard, 4))
    node.start()
    dataset = StagedDataset(str(place), fields=("id",))
    loader = DataLoader(dataset, 4, shuffle=True, shuffle_block=2, rank=1, world_size=2, explain=True)
    said = capsys.readouterr().out
    assert "webdataset:first:raise: 3 shards" in said and "up to 3 shards" in said
    assert "rank 1 of 2: 4 samples a batch, 8 together" in said and "samples of 2 shards mixed" in said
    assert len(loader) == 2 and "2 batches an epoch" in loader.explain()


def test_indexed_ahead_by_the_command(node: Node, place: Path):
    for shard in range(3):
        (place / f"{shard}.tar").write_bytes(shard_bytes(shard, 4))
    node.start()
    command = [str(Path(sys.executable).with_name("forebay")), "index", str(place), "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    assert (found["shards"], found["samples"]) == (3, 12)
    fetches = node.stager().fetches
    assert len(DataLoader(StagedDataset(str(place), fields=("id",)), 4)) == 3
    assert node.stager().fetches == fetches == 3
    wrong = subprocess.run(
        [*command[:3], "--format", "csv"], capture_output=True, text=True, check=False, timeout=60
    )
    assert wrong.returncode == 1 and "unknown format" in wrong.stderr


def test_one_shard_cut_into_samples_in_two_ways(node: Node, place: Path):
    """What one loader has indexed is not taken for what another one means."""
    (place / "a.tar").write_bytes(tar_bytes([("x.1.txt", b"1"), ("x.2.txt", b"2")]))
    node.start()
    assert batches(place, ("1.txt",), "webdataset") == [([b"1"],)]
    assert batches(place, ("txt",), WebDataset("last")) == [([b"1", b"2"],)]
    assert batches(place, ("2.txt",), "webdataset") == [([b"2"],)]
    state = DataLoader(StagedDataset(str(place), fields=("txt",), split="last")).state_dict()
    with pytest.raises(StateMismatch, match="format"):
        DataLoader(StagedDataset(str(place), fields=("1.txt",))).load_state_dict(state)


def test_a_member_twice_is_passed_over_when_wished(node: Node, place: Path):
    """F17."""
    (place / "a.tar").write_bytes(tar_bytes([("x.txt", b"1"), ("x.txt", b"2"), ("y.txt", b"3")]))
    node.start()
    with pytest.raises(FormatError, match=r"occurs twice.*duplicates="):
        batches(place, ("txt",), "webdataset")
    assert batches(place, ("txt",), WebDataset(duplicates="skip")) == [([b"1", b"3"],)]


def test_the_wrong_format_is_named_with_the_right_one(node: Node, place: Path):
    (place / "a.parquet").write_bytes(b"")
    node.start()
    with pytest.raises(EmptyDataset, match=r"'webdataset'.*'a\.parquet' could be of format parquet"):
        batches(place, ("txt",), "webdataset")


@pytest.mark.parametrize("policy", ["raise", "skip", "substitute"])
def test_samples_that_cannot_be_read(node: Node, place: Path, policy: Any, caplog: pytest.LogCaptureFixture):
    members = [(f"{n}.cls", b"x" if n in (1, 5) else b"%d" % n) for n in range(7)]
    (place / "a.tar").write_bytes(tar_bytes(members))
    node.start()

    def transform(sample: tuple[Any, ...]) -> tuple[Any, ...]:
        if sample[0] == 3:
            raise KeyError("three")
        return sample

    dataset = StagedDataset(str(place), fields=("cls",), decode="auto", transform=transform, on_error=policy)
    loader = DataLoader(dataset, 4)
    if policy == "raise":
        with pytest.raises(FormatError, match=r"sample '1' in .*a\.tar cannot be decoded"):
            list(loader)
        return
    found = [batch.tolist() for (batch,) in loader]
    assert found == ([[0, 2], [4, 6]] if policy == "skip" else [[0, 2, 2, 0], [4, 6, 6]])
    assert loader.stats.failed == 3
    assert "'three'" in caplog.text and "transform of sample '3' of" in caplog.text


def test_an_exception_in_a_transform_names_its_sample(node: Node, place: Path):
    (place / "a.tar").write_bytes(shard_bytes(0, 2))
    node.start()

    def transform(sample: tuple[Any, ...]) -> tuple[Any, ...]:
        raise RuntimeError("no")

    dataset = StagedDataset(str(place), fields=("id",), transform=transform)
    with pytest.raises(RuntimeError, match="no") as caught:
        list(DataLoader(dataset))
    assert any("sample '000-0000'" in note for note in caught.value.__notes__)


def test_a_batch_without_a_good_sample_is_an_error(node: Node, place: Path):
    (place / "a.tar").write_bytes(tar_bytes([("x.cls", b"?")]))
    node.start()
    with pytest.raises(FormatError):
        batches(place, ("cls",), "webdataset", decode="auto", on_error="skip")
