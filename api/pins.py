"""`forebay pin`, `unpin`, `evict`."""

from __future__ import annotations

import getpass
from typing import Annotated

import typer

from forebay.api import render
from forebay.api.app import find_dataset
from forebay.api.staging import AsJson, Glob
from forebay.core.channel import ask
from forebay.core.config import Settings
from forebay.core.errors import InvalidRequest
from forebay.core.protocol import (
    AddPin,
    Done,
    DropPin,
    Evict,
    Evicted,
    ListPins,
    PinReply,
    Pins,
    Selection,
)


def pin(
    dataset: Annotated[str | None, typer.Argument(help="Name or id of a dataset.")] = None,
    hours: Annotated[float | None, typer.Option(min=0, help="How long; until `unpin` if not given.")] = None,
    owner: Annotated[str | None, typer.Option(help="For whom; default: you.")] = None,
    glob: Glob = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the pins there are.")] = False,
    json: AsJson = False,
) -> None:
    """Keep what is or will be staged of a dataset, whatever else wants the room."""
    settings = Settings.load()
    if list_ or dataset is None:
        if dataset is None and not list_:
            raise InvalidRequest("name a dataset, or use --list")
        _list(settings, json)
        return
    found = find_dataset(settings, dataset, "cli")
    ttl_s = None if hours is None else hours * 3600
    request = AddPin(found.id, owner or getpass.getuser(), Selection(glob=glob), ttl_s)
    made = ask(settings.stager_socket, request, expect=PinReply).pin
    render.print_json(made) if json else render.out.print(f"{dataset} is pinned: {made.id}")


def _list(settings: Settings, json: bool) -> None:
    pins = ask(settings.stager_socket, ListPins(), expect=Pins).pins
    if json:
        render.print_json(pins)
        return
    rows = [
        (p.id, p.owner, p.dataset_id, render.clock(p.expires_at) if p.expires_at else "when unpinned")
        for p in pins
    ]
    render.print_table(("PIN", "OWNER", "DATASET", "ENDS"), rows)


def unpin(pin_id: Annotated[str, typer.Argument(help="As `forebay pin` printed it.")]) -> None:
    """Let pinned shards be evicted again."""
    ask(Settings.load().stager_socket, DropPin(pin_id), expect=Done)


def evict(
    dataset: Annotated[str, typer.Argument(help="Name or id of a dataset.")],
    glob: Glob = None,
    json: AsJson = False,
) -> None:
    """Give up what is staged of a dataset, but for what is in use or pinned."""
    settings = Settings.load()
    request = Evict(find_dataset(settings, dataset, "cli").id, Selection(glob=glob))
    gone = ask(settings.stager_socket, request, expect=Evicted)
    if json:
        render.print_json(gone)
    else:
        render.out.print(f"{gone.shards} shards given up, {gone.kept} kept (in use or pinned)")
