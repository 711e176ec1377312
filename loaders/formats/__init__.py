"""Formats: how a shard is cut into samples. One small class each, one registry.

A format's name stands for its default configuration; an instance says more:
`StagedDataset(url, format=Tokens(length=4096, dtype="uint32"), ...)`.
"""

from __future__ import annotations

from forebay.core.errors import InvalidRequest
from forebay.loaders.formats.columnar import Arrow, Parquet
from forebay.loaders.formats.folder import Folder
from forebay.loaders.formats.format import Format, Index, Samples, ShardFile
from forebay.loaders.formats.mds import MDS
from forebay.loaders.formats.tfrecord import TFRecord
from forebay.loaders.formats.tokens import Megatron, Tokens
from forebay.loaders.formats.webdataset import Split, WebDataset

__all__ = [
    "MDS",
    "Arrow",
    "Folder",
    "Format",
    "Index",
    "Megatron",
    "Parquet",
    "Samples",
    "ShardFile",
    "Split",
    "TFRecord",
    "Tokens",
    "WebDataset",
    "open_format",
]

_FORMATS: dict[str, type[Format]] = {
    format.name: format for format in (WebDataset, TFRecord, Parquet, Arrow, Tokens, Megatron, MDS, Folder)
}


def open_format(format: str | Format, split: Split = "first") -> Format:
    """By name, or as it is. Raises InvalidRequest for a name that is not known."""
    if isinstance(format, Format):
        return format
    if format == WebDataset.name:
        return WebDataset(split)
    if format not in _FORMATS:
        raise InvalidRequest(f"unknown format {format!r}", hint=f"one of {', '.join(_FORMATS)}")
    return _FORMATS[format]()
