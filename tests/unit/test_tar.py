"""The tar index: what is in a shard, and every way in which a shard can be wrong."""

from __future__ import annotations

import os
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.errors import DuplicateMember, FormatError, MissingField, TruncatedShard
from forebay.loaders.formats import ShardFile, WebDataset
from forebay.loaders.formats.spans import ShardIndex
from forebay.loaders.formats.webdataset import split_name
from tests.conftest import shard_bytes, tar_bytes


def index(data: bytes, **options: str) -> ShardIndex:
    found = WebDataset(**options).index(ShardFile("s3://b/shard.tar", data, len(data)))
    return ShardIndex.decode(found.payload)


def read(data: bytes, found: ShardIndex, sample: int, field: str) -> bytes:
    offsets, sizes = found.column(field)
    return data[offsets[sample] : offsets[sample] + sizes[sample]]


names = st.text("abcXYZ01-_", min_size=1, max_size=8)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(names, st.dictionaries(names, st.binary(max_size=600), min_size=1, max_size=3)), max_size=8
    ),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_every_field_of_every_sample_is_found(samples, format):
    members = [
        (f"{number}{key}.{field}", data)
        for number, (key, fields) in enumerate(samples)
        for field, data in {f.lower(): d for f, d in fields.items()}.items()
    ]
    data = tar_bytes(members, format)
    found = index(data)
    assert found.keys == [f"{number}{key}" for number, (key, _) in enumerate(samples)]
    for number, (_, fields) in enumerate(samples):
        for field, content in {f.lower(): d for f, d in fields.items()}.items():
            assert read(data, found, number, field) == content


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_unicode_names(format):
    name = "deep/" * 60 + "naïve-😀"
    data = tar_bytes([(f"{name}.txt", b"x")], format)
    assert index(data).keys == [name]


def test_directories_and_hidden_files_are_passed_over():
    """F18."""
    data = tar_bytes([("./.hidden", b""), ("README", b"r"), ("./d/a.txt", b"1")])
    found = index(data)
    assert found.keys == ["d/a"] and read(data, found, 0, "txt") == b"1"


def test_dots_split_at_the_first_or_at_the_last():
    """F16: the rule of the format, and a way to say otherwise."""
    assert split_name("x/Track 2.0 (Clean).mp3", "first") == ("x/Track 2", "0 (clean).mp3")
    assert split_name("x/Track 2.0 (Clean).mp3", "last") == ("x/Track 2.0 (Clean)", "mp3")
    data = tar_bytes([("22.05.png", b"")])
    file = ShardFile("s3://b/shard.tar", data, len(data))
    with pytest.raises(MissingField, match=r"it has 05.png .*split=.last"):
        WebDataset().open(file, WebDataset().index(file).payload, ()).value(0, "png")


def test_alternatives_take_the_first_that_is_there():
    data = tar_bytes([("a.jpg", b"J"), ("b.png", b"P"), ("c.png", b"p"), ("c.jpg", b"j")])
    found = index(data)
    assert [read(data, found, i, "jpg;png") for i in range(3)] == [b"J", b"P", b"j"]


def test_a_member_twice_names_both_places():
    """F17."""
    with pytest.raises(DuplicateMember, match=r"shard.tar.*a\.txt.*512 and 1536"):
        index(tar_bytes([("a.txt", b"1"), ("a.txt", b"2")]))


def test_scattered_samples_name_the_remedy():
    """F18."""
    with pytest.raises(FormatError, match="--sort=name"):
        index(tar_bytes([("a.x", b""), ("b.x", b""), ("a.y", b"")]))


@pytest.mark.parametrize("data", [b"", b"hello", os.urandom(5000), b"\x1f\x8b" + bytes(2000)])
def test_not_a_tar(data):
    with pytest.raises(FormatError, match=r"s3://b/shard.tar"):
        index(data)


@pytest.mark.parametrize("cut", [1, 511, 512, 513, 700, 1024, 2047, 2048])
def test_cut_off_anywhere_is_an_error_never_fewer_samples(cut):
    data = shard_bytes(0, 4)
    end = max(i for i in range(0, len(data), 512) if data[i : i + 512].strip(b"\0")) + 512
    with pytest.raises((TruncatedShard, FormatError)):
        index(data[: end - cut])


def test_exactly_the_members_without_an_end_is_cut_off():
    data = tar_bytes([("a.x", b"1" * 512)])[: 512 + 512]
    with pytest.raises(TruncatedShard):
        index(data)


def test_a_damaged_header_in_the_middle_is_an_error():
    """tarfile stops there without a word."""
    data = bytearray(tar_bytes([("a.x", b"1"), ("b.x", b"2"), ("c.x", b"3")]))
    data[1024 + 10] ^= 0xFF
    with pytest.raises(FormatError, match="damaged header at byte 1024"):
        index(bytes(data))


def test_an_empty_archive_has_no_samples():
    assert len(index(tar_bytes([]))) == 0
