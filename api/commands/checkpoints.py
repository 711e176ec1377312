"""`forebay checkpoints`: what can be restored."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from forebay.api.client import Client
from forebay.api.commands import render
from forebay.api.commands.staging import AsJson, DryRun
from forebay.core.channel import Channel, ask
from forebay.core.config import Settings
from forebay.core.errors import InvalidRequest
from forebay.core.protocol import (
    LEVELS,
    Checkpoint,
    CheckpointOpened,
    Checkpoints,
    FileReady,
    Flush,
    Flushed,
    Keep,
    OpenCheckpoint,
    OpenFile,
    Prune,
    VerifyCheckpoints,
)
from forebay.core.units import format_bytes, parse_duration

app = typer.Typer(help="Look at checkpoints: in the spool of this node, and upstream.", no_args_is_help=True)

Upstream = Annotated[str | None, typer.Option(help="URL that the run saves to.")]

_READ_S = 3600.0
_GRACE_S = 10.0


class Duration:
    """A length of time on the command line."""

    def __init__(self, text: str) -> None:
        try:
            self.seconds = parse_duration(text)
        except ValueError as err:
            raise typer.BadParameter(str(err)) from err


@app.command("ls")
def list_(
    run: Annotated[str | None, typer.Argument(help="Only this run.")] = None,
    upstream: Upstream = None,
    json: AsJson = False,
) -> None:
    """Committed checkpoints, newest first."""
    with Client() as client:
        _print(client.checkpoints(run, upstream=upstream).items, json)


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


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="The run.")],
    step: Annotated[int | None, typer.Option(help="This step; the newest if not given.")] = None,
    upstream: Upstream = None,
    json: AsJson = False,
) -> None:
    """What a restore on this node would take, and which tiers have each rank's file."""
    request = OpenCheckpoint(run, upstream, step, look=True)
    opened = ask(Settings.load().checkpoint_socket, request, expect=CheckpointOpened, timeout_s=_READ_S)
    if json:
        render.print_json(opened)
        return
    for reason in opened.skipped:
        render.err.print(f"passed over: {reason}", style="yellow")
    rows = [(file.name, format_bytes(file.size_bytes), " > ".join(file.tiers)) for file in opened.files]
    title = f"{run} step {opened.checkpoint.step} attempt {opened.checkpoint.attempt}"
    render.print_table(("FILE", "SIZE", "FROM"), rows, title=title)


@app.command()
def restore(
    run: Annotated[str, typer.Argument(help="The run.")],
    into: Annotated[Path, typer.Argument(help="A folder; made if it is not there.")],
    step: Annotated[int | None, typer.Option(help="This step; the newest if not given.")] = None,
    upstream: Upstream = None,
    json: AsJson = False,
) -> None:
    """The files of a checkpoint, verified, under the names they had in a watched folder."""
    socket = Settings.load().checkpoint_socket
    with Channel.connect(socket, "cli") as channel:
        request = OpenCheckpoint(run, upstream, step, verify=True)
        opened, _ = channel.request(request, expect=CheckpointOpened, timeout_s=_READ_S)
        at = opened.checkpoint
        targets = {file.name: into / file.name.removeprefix("files/") for file in opened.files}
        if there := [str(target) for target in targets.values() if target.exists()]:
            raise InvalidRequest(f"{there[0]} is there already", hint="name a folder without them")
        for name, target in targets.items():
            asked = OpenFile(run, at.step, at.attempt, name)
            _, (fd,) = channel.request(asked, expect=FileReady, timeout_s=_READ_S)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.part")
            with open(fd, "rb") as source, partial.open("wb") as copy:
                shutil.copyfileobj(source, copy, 16 << 20)
            partial.rename(target)
    if json:
        render.print_json(
            {"run": run, "step": at.step, "files": [str(target) for target in targets.values()]}
        )
    else:
        render.out.print(f"{run} step {at.step}: {len(targets)} files in {into}")


@app.command()
def rm(
    run: Annotated[str, typer.Argument(help="The run.")],
    step: Annotated[int, typer.Argument(help="The step.")],
    upstream: Upstream = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Remove one step, upstream when --upstream is given, else from the spool of this node.

    Never the newest, a pinned one, or one that is being read.
    """
    with Client() as client:
        gone = client.remove(run, step, upstream=upstream, dry_run=dry_run).items
    _print_gone(gone, dry_run, json)


@app.command()
def prune(
    run: Annotated[str, typer.Argument(help="The run.")],
    upstream: Upstream = None,
    last: Annotated[int | None, typer.Option(min=0, help="Keep so many of the newest.")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Keep steps that this divides.")] = None,
    best: Annotated[int | None, typer.Option(min=0, help="Keep so many of the best by --metric.")] = None,
    metric: Annotated[str, typer.Option(help="Name of a metric given to `save`.")] = "",
    highest: Annotated[bool, typer.Option(help="The best have the highest metric, not the lowest.")] = False,
    age: Annotated[Duration | None, typer.Option(parser=Duration, help="Keep younger ones: 12h, 7d.")] = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Remove checkpoints that no rule keeps; never the newest, nor a pinned one.

    Upstream when --upstream is given, else in the spool of this node.
    """
    if (last, every, best, age) == (None, None, None, None):
        raise InvalidRequest("no rule says what to keep", hint="--last, --every, --best or --age")
    keep = Keep(last, every, best, metric, "max" if highest else "min", age.seconds if age else None)
    request = Prune(run, upstream, keep, dry_run)
    gone = ask(Settings.load().checkpoint_socket, request, expect=Checkpoints, timeout_s=_READ_S).checkpoints
    _print_gone(gone, dry_run, json)


@app.command()
def pin(
    run: Annotated[str, typer.Argument(help="The run.")],
    step: Annotated[int, typer.Argument(help="The step.")],
    upstream: Upstream = None,
    json: AsJson = False,
) -> None:
    """Retention leaves this checkpoint alone."""
    with Client() as client:
        client.pin_checkpoint(run, step, upstream=upstream)
    if json:
        render.print_json({"run": run, "step": step, "pinned": True})


@app.command()
def unpin(
    run: Annotated[str, typer.Argument(help="The run.")],
    step: Annotated[int, typer.Argument(help="The step.")],
    upstream: Upstream = None,
    json: AsJson = False,
) -> None:
    """Retention may take it again."""
    with Client() as client:
        client.unpin_checkpoint(run, step, upstream=upstream)
    if json:
        render.print_json({"run": run, "step": step, "pinned": False})


@app.command()
def flush(
    deadline: Annotated[Duration, typer.Option(parser=Duration, help="Longest time: 25s, 2m.")],
    level: Annotated[str, typer.Option(help="How far: local, durable or committed.")] = "committed",
    json: AsJson = False,
) -> None:
    """Before the node goes: bring what is absorbed to safety, the newest first, as far as time allows.

    Exit status 1 when something did not get that far.
    """
    if level not in LEVELS:
        raise InvalidRequest(f"there is no level {level!r}", hint=", ".join(LEVELS))
    request = Flush(level, deadline.seconds)
    timeout_s = deadline.seconds + _GRACE_S
    flushed = ask(Settings.load().checkpoint_socket, request, expect=Flushed, timeout_s=timeout_s).attempts
    if json:
        render.print_json(flushed)
    else:
        rows = [(a.run, a.step, a.rank, format_bytes(a.size_bytes), a.level, a.error or "") for a in flushed]
        render.print_table(("RUN", "STEP", "RANK", "SIZE", "LEVEL", "PROBLEM"), rows)
    if any(a.error or LEVELS.index(a.level) < LEVELS.index(level) for a in flushed):
        raise typer.Exit(1)


def _print_gone(gone: list[Checkpoint], dry_run: bool, json: bool) -> None:
    if not json:
        render.out.print(f"{len(gone)} {'would go' if dry_run else 'removed'}")
    _print(gone, json)


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
