"""StagedDataset: which samples, which fields, how decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from forebay.core.errors import InvalidRequest
from forebay.core.protocol import OpenDataset, Register
from forebay.loaders.decode import Decode, Decoder, array, collate, collate_column, decode_field, open_decoder
from forebay.loaders.formats import Split, open_format
from forebay.loaders.order import Ints
from forebay.loaders.session import MappedShard, StagerSession

KEY = "__key__"


class StagedDataset:
    """A dataset below a URL (or registered under a name), read through stagerd.

    url_or_name: `s3://bucket/prefix`, a path, any fsspec URL; or a name from `forebay ls`.
    fields: what a sample is made of, in order: extensions (`png`, alternatives as `jpg;png`) and
        `__key__`. A batch is a tuple with one column per field.
    decode: "auto" (by extension), a decoder's name, a function of bytes, or one of these per field;
        None leaves bytes.
    transform: applied to each sample's tuple, in the loader's threads.
    cache_dir: where a private stagerd keeps shards when no daemon runs; a temporary one by default.
    keys: the shards to take, instead of all below the URL.
    split: where a member's base name ends, at its "first" dot (WebDataset) or its "last".
    """

    def __init__(
        self,
        url_or_name: str,
        *,
        fields: Sequence[str],
        format: str = "webdataset",
        decode: Decode = None,
        transform: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
        name: str | None = None,
        keys: Sequence[str] | None = None,
        cache_dir: str | Path | None = None,
        split: Split = "first",
    ) -> None:
        if isinstance(fields, str) or not fields:
            raise InvalidRequest("fields is a sequence of names", hint='for example fields=("png", "cls")')
        self.fields = tuple(fields)
        self._decoders = [(field, open_decoder(decode, field)) for field in fields]
        self._transform = transform
        self._request = _request(url_or_name, format, name, keys)
        self._format = open_format(format, split)
        self._cache_dir = Path(cache_dir) if cache_dir else None

    def open_session(self, dataset_id: str | None = None) -> StagerSession:
        """A connection of its own; the caller closes it. Lists the source unless given an id."""
        request = OpenDataset(dataset_id) if dataset_id else self._request
        return StagerSession(request, self._format, self._cache_dir)

    def read(self, rows: Ints, shards: Mapping[int, MappedShard]) -> list[tuple[Any, ...]]:
        """Decoded samples. Raises MissingField, FormatError."""
        columns = (self._values(*field, rows, shards) for field in self._decoders)
        samples = list(zip(*columns, strict=True))
        return [self._transform(sample) for sample in samples] if self._transform else samples

    def read_batch(self, rows: Ints, shards: Mapping[int, MappedShard]) -> tuple[Any, ...]:
        """A batch in columns; the same values as `collate(read(...))`, without the detour where it pays."""
        if self._transform:
            return collate(self.read(rows, shards))
        return tuple(
            _gather(field, rows, shards)
            if decoder is array
            else collate_column(list(self._values(field, decoder, rows, shards)))
            for field, decoder in self._decoders
        )

    def _values(
        self, field: str, decoder: Decoder, rows: Ints, shards: Mapping[int, MappedShard]
    ) -> Iterator[Any]:
        for number, sample in rows.tolist():
            shard = shards[number]
            if field == KEY:
                yield shard.index.keys[sample]
                continue
            offset, size_bytes = _locate(field, shard, sample)
            data = shard.data[offset : offset + size_bytes]
            if decoder is bytes:
                yield data
            else:
                yield decode_field(decoder, data, field, shard.index.keys[sample], shard.name)


def _locate(field: str, shard: MappedShard, sample: int) -> tuple[int, int]:
    offsets, sizes = shard.index.column(field)
    if offsets[sample] < 0:
        raise shard.index.missing(sample, field, shard.name)
    return offsets[sample], sizes[sample]


def _gather(field: str, rows: Ints, shards: Mapping[int, MappedShard]) -> torch.Tensor | list[torch.Tensor]:
    """Bytes straight from the mapped shards into the batch: one copy, without the GIL."""
    spans = [(shards[number], *_locate(field, shards[number], sample)) for number, sample in rows.tolist()]
    sizes = {size_bytes for _, _, size_bytes in spans}
    if len(sizes) != 1:
        return [array(shard.data[offset : offset + size_bytes]) for shard, offset, size_bytes in spans]
    batch = torch.empty((len(spans), sizes.pop()), dtype=torch.uint8)
    into = batch.numpy()
    for place, (shard, offset, size_bytes) in enumerate(spans):
        into[place] = shard.array[offset : offset + size_bytes]
    return batch


def _request(
    url_or_name: str, format: str, name: str | None, keys: Sequence[str] | None
) -> Register | OpenDataset:
    """A URL or path is registered (and listed) now; a bare name was registered before."""
    if "/" in url_or_name:
        return Register(url_or_name, format, name, list(keys) if keys is not None else None)
    return OpenDataset(url_or_name)
