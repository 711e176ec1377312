"""Compressed shards: unpacked as a whole into memory of this process, where their samples then lie."""

from __future__ import annotations

import bz2
import gzip
import mmap
import os
import zlib
from typing import Any, BinaryIO

from forebay.core.errors import FormatError, TruncatedShard
from forebay.core.units import format_bytes
from forebay.loaders.extras import need

_PIECE_BYTES = 1 << 20
# A shard that becomes larger than this many times its size, and than so much, is a bomb.
_MOST_TIMES = 100
_HARMLESS_BYTES = 1 << 30


def is_packed(key: str) -> bool:
    return key.endswith((".gz", ".tgz", ".zst", ".zstd", ".bz2"))


def unpack(fd: int, name: str) -> tuple[mmap.mmap, int]:
    """(memory, bytes). Raises TruncatedShard, FormatError."""
    limit = max(_HARMLESS_BYTES, _MOST_TIMES * os.fstat(fd).st_size)
    memory = os.memfd_create("forebay-unpacked", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "rb") as packed, open(memory, "wb", closefd=False) as to:
            packed.seek(0)
            reader, unpacking_errors = _open(packed, name)
            try:
                while piece := reader.read(_PIECE_BYTES):
                    if to.tell() + len(piece) > limit:
                        raise FormatError(f"{name} unpacks to over {format_bytes(limit)}: taken for a bomb")
                    to.write(piece)
            except EOFError as err:
                raise TruncatedShard(f"{name} is cut off: {err}") from err
            except unpacking_errors as err:
                raise FormatError(f"{name} cannot be unpacked: {err}") from err
            size_bytes = to.tell()
        if not size_bytes:
            return mmap.mmap(-1, 1), 0
        return mmap.mmap(memory, size_bytes, prot=mmap.PROT_READ), size_bytes
    finally:
        os.close(memory)


def _open(packed: BinaryIO, name: str) -> tuple[Any, type[Exception] | tuple[type[Exception], ...]]:
    """A reader that unpacks no more than it is asked for, and what it raises for bytes that make no sense."""
    if name.endswith((".zst", ".zstd")):
        zstandard = need("zstandard", "formats")
        reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
        return reader, zstandard.ZstdError
    if name.endswith(".bz2"):
        return bz2.BZ2File(packed), OSError
    # BadGzipFile is an OSError; a damaged stream is zlib's own.
    return gzip.GzipFile(fileobj=packed), (OSError, zlib.error)
