"""`forebay index`: find the samples of every shard ahead of training."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from forebay.api.commands import render
from forebay.api.commands.staging import AsJson


def index(
    url: Annotated[str, typer.Argument(help="URL or path of a prefix, or the name of a dataset.")],
    format: Annotated[str, typer.Option(help="webdataset, tfrecord, parquet, ...")] = "webdataset",
    split: Annotated[
        Literal["first", "last"], typer.Option(help="WebDataset: the dot at which a base name ends.")
    ] = "first",
    json: AsJson = False,
) -> None:
    """Index every shard of a dataset on this node, which stages each of them once.

    A loader's `len()` and its first epoch then find everything ready. Loaders that name the same format share
    the indices.
    """
    from forebay.loaders import StagedDataset

    # `fields` is what a sample is made of; to find the samples none is needed.
    dataset = StagedDataset(url, fields=("__key__",), format=format, split=split)
    with dataset.open_session() as session:
        counts = session.counts()
        name = session.dataset.name
    found = {"dataset": name, "format": format, "shards": len(counts), "samples": sum(counts)}
    if json:
        render.print_json(found)
    else:
        render.out.print(f"{name}: {found['samples']} samples in {found['shards']} shards")
