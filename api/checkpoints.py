"""`forebay checkpoints`: what can be restored."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.api import render
from forebay.api.staging import AsJson
from forebay.core.channel import ask
from forebay.core.config import Settings
from forebay.core.protocol import Checkpoint, Checkpoints, ListCheckpoints, VerifyCheckpoints
from forebay.core.units import format_bytes

app = typer.Typer(help="Look at checkpoints: in the spool of this node, and upstream.", no_args_is_help=True)

Upstream = Annotated[str | None, typer.Option(help="URL that the run saves to.")]

_READ_S = 3600.0


@app.command("ls")
def list_(
    run: Annotated[str | None, typer.Argument(help="Only this run.")] = None,
    upstream: Upstream = None,
    json: AsJson = False,
) -> None:
    """Committed checkpoints, newest first."""
    request = ListCheckpoints(run, upstream)
    found = ask(Settings.load().checkpoint_socket, request, expect=Checkpoints, timeout_s=_READ_S)
    _print(found.checkpoints, json)


@app.command()
def verify(
    run: Annotated[str, typer.Argument(help="The run.")],
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    upstream: Upstream = None,
    json: AsJson = False,
) -> None:
    """Read every byte of every copy and compare digests. Exit status 1 when one does not fit."""
    request = VerifyCheckpoints(run, upstream, step)
    found = ask(Settings.load().checkpoint_socket, request, expect=Checkpoints, timeout_s=_READ_S)
    _print(found.checkpoints, json)
    if not found.checkpoints:
        render.err.print(f"there is no checkpoint of {run}", style="red")
    if not found.checkpoints or any(c.problem for c in found.checkpoints):
        raise typer.Exit(1)


def _print(found: list[Checkpoint], json: bool) -> None:
    if json:
        render.print_json(found)
        return
    rows = [
        (
            c.run,
            c.step,
            c.attempt,
            c.world_size,
            format_bytes(c.size_bytes),
            render.clock(c.committed_at),
            ", ".join(c.tiers),
            c.problem or "ok",
        )
        for c in found
    ]
    columns = ("RUN", "STEP", "ATTEMPT", "RANKS", "SIZE", "COMMITTED", "WHERE", "STATE")
    render.print_table(columns, rows)
