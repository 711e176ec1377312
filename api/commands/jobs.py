"""`forebay jobs`: stage jobs that were started, wherever from."""

from __future__ import annotations

import itertools
from typing import Annotated, get_args

import typer

from forebay.api.client import Client, calls
from forebay.api.commands import render
from forebay.api.commands.staging import AsJson, ended_badly, follow, print_job
from forebay.core.errors import InvalidRequest
from forebay.core.protocol import JobState, StageJob
from forebay.core.units import format_bytes

app = typer.Typer(help="Stage jobs: ls, show, wait, cancel, retry.", no_args_is_help=True)
_STATES: tuple[JobState, ...] = get_args(JobState)
JobId = Annotated[str, typer.Argument(help="Id of the job, as `forebay stage` printed it.")]


@app.command("ls")
def ls(
    state: Annotated[
        str | None, typer.Option(help="Only running, done, partial, failed or cancelled ones.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 1000,
    json: AsJson = False,
) -> None:
    """Jobs, newest first."""
    wanted = next((known for known in _STATES if known == state), None)
    if state and not wanted:
        raise InvalidRequest(f"no job is {state!r}", hint=", ".join(_STATES))
    with Client() as client:
        call = calls.jobs(state=wanted, limit=min(limit, 1000))
        jobs = list(itertools.islice(client.all(call), limit))
    if json:
        render.print_json(jobs)
        return
    rows = [
        (j.id, j.dataset, j.tier, j.state, f"{j.shards_done}/{j.shards_total}",
         format_bytes(j.bytes_done), len(j.failed), j.owner)
        for j in jobs
    ]  # fmt: skip
    render.print_table(("JOB", "DATASET", "TIER", "STATE", "SHARDS", "BYTES", "FAILED", "OWNER"), rows)


@app.command("show")
def show(job: JobId, json: AsJson = False) -> None:
    """One job, with what failed and why."""
    with Client() as client:
        _end(client.job(job), json)


@app.command("wait")
def wait(job: JobId, json: AsJson = False) -> None:
    """Progress until it ends. Exit status 1 unless everything is there."""
    with Client() as client:
        _end(follow(client, client.job(job)), json)


@app.command("cancel")
def cancel(job: JobId, json: AsJson = False) -> None:
    """Call a job off. What it brought stays until its room is needed."""
    with Client() as client:
        found = client.cancel(job)
    render.print_json(found) if json else print_job(found)


@app.command("retry")
def retry(job: JobId, json: AsJson = False) -> None:
    """Try the shards that failed again."""
    with Client() as client:
        _end(client.retry(job), json)


def _end(job: StageJob, json: bool) -> None:
    render.print_json(job) if json else print_job(job)
    if ended_badly(job):
        raise typer.Exit(1)
