"""WebDataset tar: members with one base name, one after the other, are one sample.

Format: https://github.com/webdataset/webdataset (naming), POSIX pax and ustar (pubs.opengroup.org,
"pax", IEEE Std 1003.1), GNU long names. The header is parsed by the standard library.
"""

from __future__ import annotations

import os
import tarfile

from forebay.core.errors import DuplicateMember, FormatError, TruncatedShard
from forebay.loaders.formats import Split
from forebay.loaders.index import IndexBuilder, ShardIndex

_BLOCK_BYTES = 512


class TarFormat:
    """`split="first"` cuts a base name at its first dot, as WebDataset does; "last" at its last."""

    def __init__(self, split: Split = "first") -> None:
        self._split = split

    def index(self, fd: int, shard: str) -> ShardIndex:
        with os.fdopen(os.dup(fd), "rb") as file:
            file.seek(0)
            builder = IndexBuilder()
            seen: set[str] = set()
            try:
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    for member in tar:
                        if member.isfile():
                            self._add(builder, seen, member, shard)
                    _check_end(fd, tar.offset, shard)
            except tarfile.ReadError as err:
                raise _unreadable(fd, err, shard) from err
        return builder.build()

    def _add(self, builder: IndexBuilder, seen: set[str], member: tarfile.TarInfo, shard: str) -> None:
        key, field = split_name(member.name, self._split)
        if not field:
            return
        if member.sparse is not None:
            raise FormatError(
                f"{shard}: {member.name!r} is a sparse member", hint="write it with tar without --sparse"
            )
        if not builder.keys or builder.keys[-1] != key:
            if key in seen:
                raise FormatError(
                    f"{shard}: the members of sample {key!r} do not follow each other "
                    f"({member.name!r} at byte {member.offset})",
                    hint="write the shard with tar --sort=name",
                )
            seen.add(key)
            builder.begin_sample(key)
        earlier = builder.offset_in_sample(field)
        if earlier is not None:
            raise DuplicateMember(
                f"{shard}: {member.name!r} occurs twice, at bytes {earlier} and {member.offset_data}",
                hint="write each member once",
            )
        builder.add(field, member.offset_data, member.size)


def split_name(name: str, split: Split) -> tuple[str, str]:
    """`a/b/001.seg.png` -> (`a/b/001`, `seg.png`); no field for hidden files and bare names."""
    folder, _, base = name.removeprefix("./").rpartition("/")
    stem, _, field = base.partition(".") if split == "first" else base.rpartition(".")
    if not stem:
        return name, ""
    return (f"{folder}/{stem}" if folder else stem), field.lower()


def _check_end(fd: int, offset: int, shard: str) -> None:
    """tarfile stops silently at a damaged header and at a missing end; a loader must not."""
    block = os.pread(fd, _BLOCK_BYTES, offset)
    if len(block) < _BLOCK_BYTES:
        raise TruncatedShard(
            f"{shard} ends at byte {offset + len(block)} without an end-of-archive block",
            hint="the shard was cut off when it was written or uploaded; write it again",
        )
    if block.strip(b"\0"):
        raise FormatError(f"{shard} has a damaged header at byte {offset}", hint="write the shard again")


def _unreadable(fd: int, err: tarfile.ReadError, shard: str) -> FormatError:
    size_bytes = os.fstat(fd).st_size
    if "unexpected end" in str(err) or "truncated" in str(err):
        return TruncatedShard(
            f"{shard} is cut off: {err} ({size_bytes} bytes)", hint="write or upload the shard again"
        )
    return FormatError(f"{shard} is not a tar file ({err}, {size_bytes} bytes)", hint="check the format")
