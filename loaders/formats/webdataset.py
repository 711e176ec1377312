"""WebDataset tar: members with one base name, one after the other, are one sample.

Format: https://github.com/webdataset/webdataset (naming), POSIX pax and ustar (pubs.opengroup.org,
"pax", IEEE Std 1003.1), GNU long names. The header is parsed by the standard library.
"""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from forebay.core.errors import DuplicateMember, FormatError, TruncatedShard
from forebay.loaders.formats.format import BinaryView, Format, Index, ShardFile
from forebay.loaders.formats.spans import IndexBuilder, ShardIndex, Spans

log = logging.getLogger("forebay.loaders")

Split = Literal["first", "last"]
_BLOCK_BYTES = 512
_DOTS = 'a base name with dots in it splits at the first one; split="last" splits at the last'


@dataclass(frozen=True)
class WebDataset(Format):
    """Fields are extensions, in lower case; `a;b` takes the first of them that a sample has.

    split: where a base name ends, at its "first" dot, as WebDataset does, or at its "last".
    duplicates: a member that comes twice is an error ("raise"), or passed over with a word ("skip").
    """

    name: ClassVar[str] = "webdataset"
    split: Split = "first"
    duplicates: Literal["raise", "skip"] = "raise"

    @property
    def signature(self) -> str:
        return f"{self.name}:{self.split}:{self.duplicates}"

    def index(self, file: ShardFile) -> Index:
        found = _Members(file, self)
        try:
            with tarfile.open(fileobj=BinaryView(file), mode="r:") as tar:
                for member in tar:
                    if member.isfile():
                        found.add(member)
                _check_end(file, tar.offset)
        except tarfile.ReadError as err:
            raise _unreadable(file, err) from err
        return found.builder.index()

    def open(self, file: ShardFile, index: bytes, fields: Sequence[str]) -> Spans:
        return Spans(file, ShardIndex.decode(index), _DOTS)


class _Members:
    """Collects a shard's members into samples."""

    def __init__(self, file: ShardFile, format: WebDataset) -> None:
        self.builder = IndexBuilder()
        self._file = file
        self._format = format
        self._seen: set[str] = set()

    def add(self, member: tarfile.TarInfo) -> None:
        shard = self._file.name
        key, field = split_name(member.name, self._format.split)
        if not field:
            return
        if member.sparse is not None:
            raise FormatError(
                f"{shard}: {member.name!r} is a sparse member", hint="write it with tar without --sparse"
            )
        if not self.builder.keys or self.builder.keys[-1] != key:
            if key in self._seen:
                raise FormatError(
                    f"{shard}: the members of sample {key!r} do not follow each other "
                    f"({member.name!r} at byte {member.offset})",
                    hint="write the shard with tar --sort=name",
                )
            self._seen.add(key)
            self.builder.begin_sample(key)
        earlier = self.builder.offset_in_sample(field)
        if earlier is None:
            self.builder.add(field, member.offset_data, member.size)
        elif self._format.duplicates == "raise":
            raise DuplicateMember(
                f"{shard}: {member.name!r} occurs twice, at bytes {earlier} and {member.offset_data}",
                hint='write each member once, or read with WebDataset(duplicates="skip")',
            )
        else:
            log.warning("%s: %r occurs again at byte %d, passed over", shard, member.name, member.offset_data)


def split_name(name: str, split: Split) -> tuple[str, str]:
    """`a/b/001.seg.png` -> (`a/b/001`, `seg.png`); no field for hidden files and bare names."""
    folder, _, base = name.removeprefix("./").rpartition("/")
    stem, _, field = base.partition(".") if split == "first" else base.rpartition(".")
    if not stem:
        return name, ""
    return (f"{folder}/{stem}" if folder else stem), field.lower()


def _check_end(file: ShardFile, offset: int) -> None:
    """tarfile stops silently at a damaged header and at a missing end; a loader must not."""
    block = bytes(file.data[offset : min(offset + _BLOCK_BYTES, file.size_bytes)])
    if len(block) < _BLOCK_BYTES:
        raise TruncatedShard(
            f"{file.name} ends at byte {offset + len(block)} without an end-of-archive block",
            hint="the shard was cut off when it was written or uploaded; write it again",
        )
    if block.strip(b"\0"):
        raise FormatError(f"{file.name} has a damaged header at byte {offset}", hint="write the shard again")


def _unreadable(file: ShardFile, err: tarfile.ReadError) -> FormatError:
    if "unexpected end" in str(err) or "truncated" in str(err):
        return TruncatedShard(
            f"{file.name} is cut off: {err} ({file.size_bytes} bytes)", hint="write or upload the shard again"
        )
    return FormatError(
        f"{file.name} is not a tar file ({err}, {file.size_bytes} bytes)", hint="check the format"
    )
