"""StagedDataset: which samples, which fields, how decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from forebay.core.errors import InvalidRequest
from forebay.core.protocol import OpenDataset, Register
from forebay.loaders.batch import Cut, OnSampleError, SampleReader
from forebay.loaders.collate import Sample
from forebay.loaders.decode import Decode, open_decoder
from forebay.loaders.formats import Format, Split, open_format
from forebay.loaders.order import Order
from forebay.loaders.session import StagerSession


class StagedDataset:
    """A dataset below a URL (or registered under a name), read through stagerd.

    url_or_name: `s3://bucket/prefix`, a path, any fsspec URL; or a name from `forebay ls`.
    fields: what a sample is made of, in order: what the format calls its fields (of WebDataset the
        extensions: `png`, alternatives as `jpg;png`) and `__key__`. A batch is a tuple with one column
        per field.
    format: a name, or an instance that says more, as `Tokens(length=4096)` (see `loaders.formats`).
    decode: "auto" (by extension), a decoder's name, a function of the value, or one of these per field;
        None leaves bytes, or what the format has.
    transform: applied to each sample's tuple, in the loader's threads.
    on_error: what becomes of a sample that cannot be read, decoded or transformed: "raise"; "skip" it,
        so that its batch is shorter; "substitute" another one of its batch. The last two count
        (`loader.stats.failed`) and log it.
    cache_dir: where a private stagerd keeps shards when no daemon runs; a temporary one by default.
    keys: the shards to take, instead of all below the URL.
    split: WebDataset's, where a member's base name ends, at its "first" dot or its "last".
    """

    def __init__(
        self,
        url_or_name: str,
        *,
        fields: Sequence[str],
        format: str | Format = "webdataset",
        decode: Decode = None,
        transform: Callable[[Sample], Sample] | None = None,
        on_error: OnSampleError = "raise",
        name: str | None = None,
        keys: Sequence[str] | None = None,
        cache_dir: str | Path | None = None,
        split: Split = "first",
    ) -> None:
        if isinstance(fields, str) or not fields:
            raise InvalidRequest("fields is a sequence of names", hint='for example fields=("png", "cls")')
        if on_error not in get_args(OnSampleError):
            raise InvalidRequest(f"on_error is {on_error!r}", hint="raise, skip or substitute")
        self.fields = tuple(fields)
        self.format = open_format(format, split)
        self.on_error: OnSampleError = on_error
        self.cut = Cut(tuple((field, open_decoder(decode, field)) for field in fields), transform)
        self.reader = SampleReader([self.cut], on_error)
        self._request = _request(url_or_name, self.format.name, name, keys)
        self.cache_dir = Path(cache_dir) if cache_dir else None

    @property
    def single(self) -> bool:
        return self.format.single

    @property
    def signature(self) -> str:
        return self.format.signature

    def open_session(self, dataset_id: str | None = None, socket: Path | None = None) -> StagerSession:
        """A connection of its own; the caller closes it. Lists the source unless given an id.

        `socket`: of another session, instead of looking for a stagerd.
        """
        request = OpenDataset(dataset_id) if dataset_id else self._request
        return StagerSession(request, self.format, self.fields, self.cache_dir, socket)

    def order(self, session: StagerSession, shuffle: bool, seed: int, shuffle_block: int | None) -> Order:
        """Raises InvalidRequest."""
        block_shards = self.format.block_shards if shuffle_block is None else shuffle_block
        if block_shards < 1:
            raise InvalidRequest(f"shuffle_block is {block_shards}, must be at least 1")
        return Order(session.shards, shuffle, seed, block_shards if shuffle else 1)


def _request(
    url_or_name: str, format: str, name: str | None, keys: Sequence[str] | None
) -> Register | OpenDataset:
    """A URL or path is registered (and listed) now; a bare name was registered before."""
    if "/" in url_or_name:
        return Register(url_or_name, format, name, list(keys) if keys is not None else None)
    return OpenDataset(url_or_name)
