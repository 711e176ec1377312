"""`forebay pin`, `unpin`, `evict`."""

from __future__ import annotations

import getpass
from typing import Annotated

import typer

from forebay.api.client import Client, calls
from forebay.api.commands import render
from forebay.api.commands.staging import AsJson, DryRun, Glob
from forebay.core.errors import InvalidRequest


def pin(
    dataset: Annotated[str | None, typer.Argument(help="Name or id of a dataset.")] = None,
    hours: Annotated[float | None, typer.Option(min=0, help="How long; until `unpin` if not given.")] = None,
    owner: Annotated[str | None, typer.Option(help="For whom; default: you.")] = None,
    glob: Glob = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the pins there are.")] = False,
    json: AsJson = False,
) -> None:
    """Keep what is or will be staged of a dataset, whatever else wants the room."""
    if list_:
        _list(json)
        return
    if dataset is None:
        raise InvalidRequest("name a dataset, or use --list")
    ttl_s = None if hours is None else hours * 3600
    with Client() as client:
        made = client.pin(dataset, owner=owner or getpass.getuser(), glob=glob, ttl_s=ttl_s)
    render.print_json(made) if json else render.out.print(f"{dataset} is pinned: {made.id}")


def _list(json: bool) -> None:
    with Client() as client:
        pins = list(client.all(calls.pins(limit=1000)))
    if json:
        render.print_json(pins)
        return
    rows = [
        (p.id, p.owner, p.dataset_id, render.clock(p.expires_at) if p.expires_at else "when unpinned")
        for p in pins
    ]
    render.print_table(("PIN", "OWNER", "DATASET", "ENDS"), rows)


def unpin(
    pin_id: Annotated[str, typer.Argument(help="As `forebay pin` printed it.")], json: AsJson = False
) -> None:
    """Let pinned shards be evicted again."""
    with Client() as client:
        client.unpin(pin_id)
    if json:
        render.print_json({"unpinned": pin_id})


def evict(
    dataset: Annotated[str, typer.Argument(help="Name or id of a dataset.")],
    glob: Glob = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Give up what is staged of a dataset, but for what is in use or pinned."""
    with Client() as client:
        gone = client.evict(dataset, glob=glob, dry_run=dry_run)
    if json:
        render.print_json(gone)
    else:
        what = "would be given up" if dry_run else "given up"
        render.out.print(f"{gone.shards} shards {what}, {gone.kept} kept (in use or pinned)")
