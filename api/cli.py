"""The `forebay` command. Results on stdout, progress and errors on stderr; exit 0, 1 or 2."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version
from typing import Annotated, Any

import typer

from forebay.api.commands import checkpoints, index, jobs, pins, render, staging
from forebay.core import service
from forebay.core.config import Settings
from forebay.core.errors import ForebayError, root_cause

app = typer.Typer(
    help="Forebay: datasets to every rank, checkpoints to safety.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
config = typer.Typer(help="The settings of this node.", no_args_is_help=True)
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(config, name="config")
app.add_typer(jobs.app, name="jobs")
app.command()(staging.stage)
app.command()(index.index)
app.command()(pins.pin)
app.command()(pins.unpin)
app.command()(pins.evict)
app.command()(staging.ls)
app.command()(staging.status)


@app.callback(invoke_without_command=True)
def root(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        render.out.print(version("forebay"))
        raise typer.Exit


@app.command()
def serve(
    part: Annotated[str, typer.Argument(help="stager, checkpoint or api.")],
    with_parent: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run one daemon in the foreground (for systemd, containers, Slurm)."""
    from forebay.api.serve import PARTS, end_with_parent
    from forebay.api.serve import serve as run_part

    known = next((known for known in PARTS if known == part), None)
    if known is None:
        raise typer.BadParameter(f"{part!r} is not one of {', '.join(PARTS)}")
    if with_parent:
        end_with_parent()
    run_part(known, Settings.load())


@app.command()
def up() -> None:
    """Run all of Forebay on this machine, until Ctrl-C."""
    from forebay.api.serve import up as run_up

    settings = Settings.load()

    def ready() -> None:
        address = f"http://{settings.api.host}:{settings.api.port}"
        render.err.print(f"forebay is up: {settings.home}, {address}", style="green")
        service.notify("READY=1")

    async def main() -> None:
        await run_up(ready)

    service.run("forebay-up", main)


@config.command("show")
def config_show(json: staging.AsJson = False) -> None:
    """Every setting with its value."""
    values = Settings.load().model_dump(mode="json")
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


@config.command("check")
def config_check() -> None:
    """Exit status 1 and the reason when a setting is unknown or impossible."""
    settings = Settings.load()
    _ = settings.stager_socket, settings.checkpoint_socket
    render.out.print("ok")


def _add_plugins() -> None:
    """Commands of packages above this one (bench, demo) join by entry point, loaded when called."""
    for found in entry_points(group="forebay.commands"):
        loaded = found.load()
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=found.name)
        else:
            app.command(found.name)(loaded)


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ("bench", "demo", "--help"):
        _add_plugins()
    try:
        app()
    except (ForebayError, BaseExceptionGroup) as err:
        cause = root_cause(err)
        if not isinstance(cause, ForebayError):
            raise
        render.err.print(f"forebay: {cause}", style="red", markup=False)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
