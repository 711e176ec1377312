"""`forebay config`: the settings of this node."""

from __future__ import annotations

from typing import Any

import typer

from forebay.api.commands import render
from forebay.api.commands.staging import AsJson
from forebay.core.config import Settings
from forebay.core.redact import redact_all

app = typer.Typer(help="The settings of this node.", no_args_is_help=True)


@app.command("show")
def show(json: AsJson = False) -> None:
    """Every setting with its value; credentials in URLs are left out."""
    values = redact_all(Settings.load().model_dump(mode="json"))
    if json:
        render.print_json(values)
        return
    rows: list[tuple[str, Any]] = []
    for section, value in values.items():
        if isinstance(value, dict):
            rows += [(f"{section}.{key}", item) for key, item in value.items()]
        else:
            rows.append((section, value))
    render.print_table(("SETTING", "VALUE"), rows)


@app.command("check")
def check(json: AsJson = False) -> None:
    """Exit status 1 and the reason when a setting is unknown or impossible."""
    settings = Settings.load()
    _ = settings.stager_socket, settings.checkpoint_socket, settings.api_socket
    render.print_json({"ok": True}) if json else render.out.print("ok")
