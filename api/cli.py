"""The `forebay` command. Results on stdout, progress and errors on stderr; exit 0, 1 or 2."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points, version
from typing import Annotated

import typer

from forebay.api.client import URL_VARIABLE
from forebay.api.commands import checkpoints, config, doctor, index, jobs, pins, render, staging, tokens, top
from forebay.core import service
from forebay.core.config import Settings
from forebay.core.errors import ForebayError, root_cause
from forebay.core.systemd import notify

app = typer.Typer(
    help="Forebay: datasets to every rank, checkpoints to safety.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(config.app, name="config")
app.add_typer(jobs.app, name="jobs")
app.add_typer(tokens.app, name="token")
app.command()(staging.stage)
app.command()(index.index)
app.command()(pins.pin)
app.command()(pins.unpin)
app.command()(pins.evict)
app.command()(staging.ls)
app.command()(staging.status)
app.command()(top.top)
app.command()(doctor.doctor)
app.command("nccl-topo")(doctor.nccl_topo)


@app.callback(invoke_without_command=True)
def root(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the trace of an error.")] = False,
    api: Annotated[
        str | None,
        typer.Option(
            help="Ask the API at this URL, not the daemons of this node.",
            envvar=URL_VARIABLE,
            show_default=False,
        ),
    ] = None,
) -> None:
    if api:
        os.environ[URL_VARIABLE] = api
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
        notify("READY=1")

    async def main() -> None:
        await run_up(ready)

    service.run("forebay-up", main)


def _add_plugins() -> None:
    """Commands of packages above this one (bench, demo) join by entry point, loaded when called."""
    for found in entry_points(group="forebay.commands"):
        loaded = found.load()
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=found.name)
        else:
            app.command(found.name)(loaded)


def main() -> None:
    # A shell that completes a line says so in the environment.
    if "_FOREBAY_COMPLETE" in os.environ or {"bench", "demo", "--help"} & set(sys.argv[1:]):
        _add_plugins()
    try:
        app(prog_name="forebay")
    except (Exception, BaseExceptionGroup) as err:
        if "--debug" in sys.argv:
            raise
        render.err.print(_line(root_cause(err)), style="red", markup=False)
        raise SystemExit(1) from None


def _line(cause: BaseException) -> str:
    """What went wrong and what to do, in one line."""
    if isinstance(cause, ForebayError):
        return f"forebay: {cause}"
    what = " ".join(str(cause).split())
    return f"forebay: {type(cause).__name__}: {what} (a fault of Forebay: `forebay --debug ...` shows where)"


if __name__ == "__main__":
    main()
