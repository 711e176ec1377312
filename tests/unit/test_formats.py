"""Formats against files that other programs wrote.

tests/data: one.mds, two.mds and packed.mds.zstd by mosaicml-streaming 0.13's MDSWriter; text.bin and
text.idx by megatron-core's IndexedDatasetBuilder.
"""

from __future__ import annotations

import io
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tfrecord import TFRecordWriter

from forebay.core.errors import FormatError, InvalidRequest, MissingField, TruncatedShard
from forebay.loaders.formats import (
    MDS,
    Arrow,
    Folder,
    Format,
    Megatron,
    Parquet,
    Samples,
    ShardFile,
    TFRecord,
    Tokens,
    open_format,
)
from forebay.loaders.formats.wire import WireError, int64s, varint
from forebay.loaders.unpack import is_packed, unpack

DATA = Path(__file__).parents[1] / "data"


def shard(data: bytes, name: str = "s3://b/d/shard", companion: ShardFile | None = None) -> ShardFile:
    return ShardFile(name, data, len(data), companion)


def opened(format: Format, file: ShardFile, *fields: str) -> Samples:
    index = format.index(file)
    found = format.open(file, index.payload, fields)
    assert len(found) == index.samples
    return found


def column(found: Samples, field: str) -> list[Any]:
    return [found.value(sample, field) for sample in range(len(found))]


# TFRecord


@pytest.fixture
def examples(tmp_path: Path) -> bytes:
    writer = TFRecordWriter(str(tmp_path / "t.tfrecord"))
    for number in range(4):
        writer.write(
            {
                "image/encoded": (bytes([number]) * number, "byte"),
                "image/class/label": (-number, "int"),
                "boxes": ([number / 2, 1.5], "float"),
                "names": ([b"a", b"bc"], "byte"),
                "ids": ([1 << 40, -1, 0], "int"),
            }
        )
    writer.close()
    return (tmp_path / "t.tfrecord").read_bytes()


def test_features_of_examples(examples: bytes):
    found = opened(TFRecord(), shard(examples))
    assert column(found, "image/encoded") == [bytes([n]) * n for n in range(4)]
    assert [value.tolist() for value in column(found, "image/class/label")] == [[0], [-1], [-2], [-3]]
    assert column(found, "boxes")[3].tolist() == [1.5, 1.5]
    assert column(found, "names")[0] == [b"a", b"bc"]
    assert column(found, "ids")[2].tolist() == [1 << 40, -1, 0]
    assert found.key(3) == "shard:3" and len(found.value(1, "record")) > 50
    with pytest.raises(MissingField, match=r"it has record, .*image/class/label"):
        found.value(0, "label")
    offsets, sizes = found.spans("image/encoded") or ([], [])
    assert examples[offsets[3] : offsets[3] + sizes[3]] == b"\3\3\3"


def record(data: bytes) -> bytes:
    def masked(part: bytes) -> int:
        crc = crc32c.crc32c(part)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_records_that_are_no_examples_are_bytes(records: list[bytes]):
    found = opened(TFRecord(), shard(b"".join(map(record, records))))
    assert column(found, "record") == records


@given(st.data())
def test_a_damaged_byte_of_a_record_is_always_found(data: st.DataObject):
    whole = bytearray(record(b"one") + record(b"") + record(b"three"))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(FormatError):
        TFRecord().index(shard(bytes(whole)))


def test_records_cut_off_anywhere_are_an_error(examples: bytes):
    offsets, sizes = opened(TFRecord(), shard(examples)).spans("record") or ([], [])
    ends = {0, *(offset + size_bytes + 4 for offset, size_bytes in zip(offsets, sizes, strict=True))}
    for cut in range(0, len(examples), 7):
        if cut not in ends:
            with pytest.raises(TruncatedShard):
                TFRecord().index(shard(examples[:cut]))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_numbers_of_any_length(numbers: list[int]):
    packed = bytearray()
    for number in numbers:
        rest = number & (2**64 - 1)
        while rest > 0x7F:
            packed.append(rest & 0x7F | 0x80)
            rest >>= 7
        packed.append(rest)
    head = bytearray([0x0A])
    length = len(packed)
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    assert int64s(memoryview(bytes(head + packed))).tolist() == numbers


@given(st.binary(max_size=30))
def test_bytes_that_are_no_message_end_in_an_error_or_a_number(data: bytes):
    for read in (int64s, lambda view: varint(view, 0)):
        try:
            read(memoryview(data))
        except WireError:
            continue


# Parquet and Arrow

TABLE = pa.table(
    {
        "image": pa.array([{"bytes": bytes([n]), "path": f"{n}.png"} for n in range(6)]),
        "label": pa.array(range(6), pa.int16()),
        "maybe": pa.array([None, 1, 2, 3, 4, 5], pa.int32()),
        "ids": pa.array([list(range(n)) for n in range(6)], pa.list_(pa.int32())),
        "fixed": pa.array([[n, n + 1] for n in range(6)], pa.list_(pa.float32(), 2)),
        "text": pa.array([f"t{n}" for n in range(6)]),
    }
)


def parquet() -> bytes:
    to = io.BytesIO()
    pq.write_table(TABLE, to, row_group_size=4, compression="zstd")
    return to.getvalue()


def arrow(*, stream: bool) -> bytes:
    to = io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(to, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=4)
    return to.getvalue()


@pytest.mark.parametrize(
    ("format", "data"),
    [(Parquet(), parquet()), (Arrow(), arrow(stream=True)), (Arrow(), arrow(stream=False))],
)
def test_columns(format: Format, data: bytes):
    fields = ("image.bytes", "label", "maybe", "ids", "fixed", "text")
    found = opened(format, shard(data), *fields)
    assert column(found, "image.bytes") == [bytes([n]) for n in range(6)]
    assert column(found, "maybe")[0] is None and found.rows("maybe") is None
    assert [value.tolist() for value in column(found, "ids")] == [list(range(n)) for n in range(6)]
    label, fixed = found.rows("label"), found.rows("fixed")
    assert label is not None and label.tolist() == list(range(6)) and label.dtype == np.int16
    assert fixed is not None and fixed.tolist() == [[n, n + 1] for n in range(6)]
    assert column(found, "text")[5] == "t5" and found.rows("text") is None
    for wrong in ("nothing", "image.nothing", "text.nothing"):
        with pytest.raises(MissingField, match="it has"):
            found.value(0, wrong)


def test_only_wanted_columns_are_read():
    found = opened(Parquet(), shard(parquet()), "label")
    with pytest.raises(MissingField, match="it has label"):
        found.value(0, "text")


@pytest.mark.parametrize("data", [b"", b"PAR1", parquet()[:-5], parquet()[:200]])
def test_no_parquet(data: bytes):
    with pytest.raises(FormatError, match="s3://b/d/shard cannot be read"):
        Parquet().index(shard(data))


@pytest.mark.parametrize("data", [b"", b"ARROW1", arrow(stream=False)[:-9], arrow(stream=True)[:700]])
def test_no_arrow(data: bytes):
    with pytest.raises(FormatError, match="s3://b/d/shard cannot be read"):
        Arrow().index(shard(data))


# MDS


def test_mds_as_its_own_writer_wrote_it():
    found = [opened(MDS(), shard((DATA / name).read_bytes())) for name in ("one.mds", "two.mds")]
    rows = [(samples, row) for samples in found for row in range(len(samples))]
    assert len(rows) == 5
    for number, (samples, row) in enumerate(rows):

        def value(field: str, samples: Samples = samples, row: int = row) -> Any:
            return samples.value(row, field)

        assert (value("b"), value("s"), value("i")) == (bytes([number]) * number, f"s{number}ä", -number)
        assert (value("u8"), value("f"), value("j")) == (number, number / 2, {"n": [number]})
        assert (value("si"), value("sd")) == (10**20 + number, Decimal(number) / 7)
        assert value("nd").dtype == np.float64 and value("nd").tolist() == [list(range(number + 1))]
        assert value("ndt").dtype == np.int16 and value("ndt").tolist() == list(range(number + 1))
        assert value("nds").shape == (2, 3) and set(value("nds").ravel().tolist()) == {number}
        assert value("pil").getpixel((1, 0)) == (number, 0, 1) and value("png")[1:4] == b"PNG"
        with pytest.raises(MissingField, match="it has b, f, i"):
            value("x")


def test_mds_compressed_and_a_pickle_is_not_read():
    with (DATA / "packed.mds.zstd").open("rb") as file:
        data, size_bytes = unpack(file.fileno(), "packed.mds.zstd")
    found = opened(MDS(), ShardFile("packed", data, size_bytes))
    assert column(found, "b") == [b"", b"\1", b"\2\2"]
    with pytest.raises(FormatError, match="'pkl' runs code"):
        found.value(0, "k")


def test_mds_cut_off_anywhere_is_an_error():
    data = (DATA / "two.mds").read_bytes()
    for cut in range(len(data)):
        with pytest.raises(TruncatedShard):
            MDS().index(shard(data[:cut]))


# Tokens


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 3), st.sampled_from(["uint16", "int32", "npy"]))
def test_windows_follow_each_other_and_share_what_is_extra(count: int, length: int, extra: int, kind: str):
    ids = np.arange(count, dtype="uint16" if kind == "npy" else kind)
    if kind == "npy":
        to = io.BytesIO()
        np.save(to, ids)
        found = opened(Tokens(length, extra), shard(to.getvalue(), "s3://b/ids.npy"))
    else:
        found = opened(Tokens(length, extra, kind), shard(ids.tobytes(), "s3://b/ids.bin"))
    expected = [list(range(at, at + length + extra)) for at in range(0, count - extra - length + 1, length)]
    assert [value.tolist() for value in column(found, "tokens")] == expected
    rows = found.rows("tokens")
    assert rows is not None and rows.tolist() == expected


def test_tokens_of_the_wrong_kind_are_refused():
    for wrong in ({"length": 0}, {"extra": -1}, {"dtype": "float32"}):
        with pytest.raises(InvalidRequest):
            Tokens(**wrong)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="no whole number of uint16"):
        Tokens().index(shard(b"abc"))
    to = io.BytesIO()
    np.save(to, np.zeros((2, 2)))
    for data in (to.getvalue(), b"no numpy", b"\x93NUMPY\1\0"):
        with pytest.raises(FormatError):
            Tokens().index(shard(data, "x.npy"))
    np.save(cut := io.BytesIO(), np.arange(100))
    with pytest.raises(FormatError, match="should end at byte"):
        Tokens().index(shard(cut.getvalue()[:-1], "x.npy"))


def megatron(index: bytes | None = None) -> ShardFile:
    table = shard((DATA / "text.idx").read_bytes() if index is None else index, "s3://b/text.idx")
    return shard((DATA / "text.bin").read_bytes(), "s3://b/text.bin", table)


def test_megatron_as_its_own_builder_wrote_it():
    sequences = column(opened(Megatron(), megatron()), "tokens")
    assert [value.tolist() for value in sequences] == [
        [0, 1, 2, 3, 4], [5, 6, 7], [], [8, 9, 10, 11, 12, 13, 14], [15],
    ]  # fmt: skip
    packed = column(opened(Megatron(length=6, extra=1), megatron()), "tokens")
    assert [value.tolist() for value in packed] == [list(range(7)), list(range(6, 13))]
    assert not Megatron().is_shard("a/text.idx") and Megatron().companion_of("a/text.bin") == "a/text.idx"
    good = (DATA / "text.idx").read_bytes()
    bad = good[:34] + struct.pack("<i", 10_000) + good[38:]
    for index in (b"", good[:20], good[:40], b"X" + good[1:], bad):
        with pytest.raises(FormatError):
            Megatron().index(megatron(index))
    with pytest.raises(FormatError, match=r"no \.idx beside it"):
        Megatron().index(shard(b"", "s3://b/text.bin"))


# Folders, compression, the registry


def test_a_file_is_a_sample():
    file = shard(b"pixels", "s3://b/train/cat/1.JPG")
    found = opened(Folder(classes=("cat", "dog")), file)
    assert (found.value(0, "jpg;png"), found.value(0, "file")) == (b"pixels", b"pixels")
    assert (found.value(0, "folder"), found.value(0, "cls")) == ("cat", 0)
    with pytest.raises(MissingField, match="it has file, jpg, folder"):
        opened(Folder(), file).value(0, "cls")


@pytest.mark.parametrize("kind", ["gz", "bz2", "zst"])
def test_unpacked_whole_or_not_at_all(tmp_path: Path, kind: str):
    import bz2
    import gzip

    import zstandard

    pack = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstandard.ZstdCompressor().compress}[kind]
    path = tmp_path / f"x.{kind}"

    def unpacked(data: bytes) -> bytes:
        path.write_bytes(data)
        with path.open("rb") as file:
            memory, size_bytes = unpack(file.fileno(), str(path))
        return bytes(memory[:size_bytes])

    body = bytes(range(256)) * 5000
    assert is_packed(path.name) and unpacked(pack(body)) == body
    assert unpacked(pack(body) + pack(b"more")) == body + b"more"
    assert unpacked(pack(b"")) == b""
    with pytest.raises(FormatError, match="cannot be unpacked"):
        unpacked(b"nonsense" * 10)
    if kind != "zst":
        # A zstd stream that ends early is seen by the format inside it.
        with pytest.raises(TruncatedShard, match="is cut off"):
            unpacked(pack(body)[:-20])


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import gzip

    monkeypatch.setattr("forebay.loaders.unpack._HARMLESS_BYTES", 1 << 20)
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(bytes(200 << 20)))
    with path.open("rb") as file, pytest.raises(FormatError, match="taken for a bomb"):
        unpack(file.fileno(), "x.gz")


def test_a_format_by_name_or_as_it_is():
    assert open_format("tokens") == Tokens() and open_format(Tokens(5)) == Tokens(5)
    assert open_format("webdataset", "last").signature != open_format("webdataset").signature
    with pytest.raises(InvalidRequest, match="one of webdataset, tfrecord"):
        open_format("csv")
