"""`forebay demo`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from forebay.benchmarks.demo.job import Outcome
from forebay.core.units import format_bytes


def demo(
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep logs and tiers in this new folder.")] = None,
) -> None:
    """Train on real data through all of Forebay, with kill -9 in the middle; prove the outcome."""
    # Imported here: `forebay --help` need not load torch and scikit-learn.
    from forebay.benchmarks.demo.story import run

    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(f"[dim]forebay demo:[/dim] {text}", highlight=False)

    with tempfile.TemporaryDirectory(prefix="forebay-demo-") as temporary:
        if keep:
            keep.mkdir(parents=True)
        outcome = run(keep or Path(temporary), say)
    if json:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=1) + b"\n")
    if not _show(outcome):
        raise typer.Exit(1)


def _show(o: Outcome) -> bool:
    """The table; True when every claim held."""
    claims = [
        (
            "it trains",
            f"{o.accuracy:.1%} of unseen digits right after {o.epochs} epochs on {o.ranks} ranks",
            o.accuracy >= 0.95,
        ),
        (
            "from a tier smaller than the data",
            f"{format_bytes(o.hot_capacity_bytes)} for {format_bytes(o.dataset_bytes)}: "
            f"{o.fetches} fetches, {o.evictions} evictions, {format_bytes(o.cold_bytes_fetched)} from cold",
            o.hot_capacity_bytes < o.dataset_bytes and o.evictions > 0,
        ),
        (
            "survives kill -9",
            f"rank and daemons killed at step {o.killed_at_step}, resumed from step {o.resumed_from_step}",
            0 < o.resumed_from_step <= o.killed_at_step < o.steps,
        ),
        (
            "no sample lost, none twice",
            f"{o.samples_lost} lost, {o.samples_repeated} repeated",
            o.samples_lost == 0 == o.samples_repeated,
        ),
        (
            "same batches as an undisturbed run",
            "every digest is equal" if o.batches_identical_to_uninterrupted_run else "digests differ",
            o.batches_identical_to_uninterrupted_run,
        ),
        (
            "checkpoints are cheap and safe",
            f"{o.checkpoints_committed} committed, training held up by {o.checkpoint_blocked_ms_p50:.1f} ms",
            o.checkpoints_committed > 0,
        ),
        (
            "no lock-in",
            "stock PyTorch reads the upload, without Forebay",
            o.stock_torch_can_read,
        ),
    ]
    table = Table("CLAIM", "SEEN", "", box=None, pad_edge=False)
    for claim, seen, holds in claims:
        table.add_row(claim, seen, "[green]yes[/green]" if holds else "[red]NO[/red]")
    console = Console()
    console.print()
    console.print(table)
    console.print(f"\n{o.wall_s:.0f} s in all", highlight=False)
    return all(holds for _, _, holds in claims)
