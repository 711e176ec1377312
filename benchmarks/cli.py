"""`forebay bench`: measure, print, and keep as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measure Forebay beside its peers, on this machine.", no_args_is_help=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
Seed = Annotated[int, typer.Option(help="Seed of the data.")]


@app.command()
def checkpoint(json: JsonFile = None, saves: int = 200) -> None:
    """Save, drain, upload and restore, against plain copies, the disk alone, and torch's own ways."""
    from forebay.benchmarks.checkpoint import bench

    bench(saves).publish(json)


@app.command()
def loader(
    json: JsonFile = None,
    scale: Annotated[float, typer.Option(help="Share of the usual number of samples.")] = 1.0,
    batch_size: int = 64,
    workers: int = 2,
    seed: Seed = 0,
) -> None:
    """Samples per second from staged shards, beside webdataset and torch's own loader."""
    from forebay.benchmarks.loader import bench

    bench(scale, batch_size, workers, seed).publish(json)


@app.command()
def lockstep(json: JsonFile = None, seed: Seed = 0) -> None:
    """Four ranks on two nodes from a source that slows down, against the bound, beside webdataset."""
    from forebay.benchmarks.lockstep import bench

    bench(seed).publish(json)


@app.command()
def staging(
    json: JsonFile = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Only these peers; s5cmd is always among them.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Cold to hot through stagerd with every MD5 checked, beside other clients on the same objects."""
    from forebay.benchmarks.staging import LOADS, bench, chosen

    bench(LOADS, chosen(peer), seed).publish(json)


@app.command()
def eviction(json: JsonFile = None, shards: int = 1000, share: float = 0.5, seed: Seed = 0) -> None:
    """Hit ratios of stagerd, LRU, FIFO and coldest-first beside the optimum, on the same traces."""
    from forebay.benchmarks.eviction import bench

    bench(shards, share, seed).publish(json)


@app.command()
def stager(json: JsonFile = None, shards: int = 2_000_000, seed: Seed = 0) -> None:
    """Scale, hand-over, latency of demands beside a stage job, bytes from cold for four nodes."""
    from forebay.benchmarks.stager import bench

    bench(shards, seed).publish(json)


@app.command()
def api(json: JsonFile = None, seed: Seed = 0) -> None:
    """Requests per second, latency beside staging, a job's first byte, the dashboard's weight."""
    from forebay.benchmarks.api import bench

    bench(seed).publish(json)


@app.command()
def figures(
    files: Annotated[list[Path], typer.Argument(help="JSON files that benches wrote.")],
    into: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/figures.md"),
) -> None:
    """Make the page of figures from JSON files."""
    from forebay.benchmarks.figures import render

    into.write_text(render(files))
