"""`forebay jobs`: stage jobs that were started, wherever from."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.api import render
from forebay.api.staging import AsJson, ended_badly, follow, print_job
from forebay.core.channel import ask
from forebay.core.config import Settings
from forebay.core.protocol import CancelJob, JobReply, Jobs, ListJobs, RetryJob, StageJob, WaitJob
from forebay.core.units import format_bytes

app = typer.Typer(help="Stage jobs: ls, show, wait, cancel, retry.", no_args_is_help=True)
JobId = Annotated[str, typer.Argument(help="Id of the job, as `forebay stage` printed it.")]


@app.command("ls")
def ls(json: AsJson = False) -> None:
    """All jobs, newest first."""
    jobs = ask(Settings.load().stager_socket, ListJobs(), expect=Jobs).jobs
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
    _end(ask(Settings.load().stager_socket, WaitJob(job), expect=JobReply).job, json)


@app.command("wait")
def wait(job: JobId, json: AsJson = False) -> None:
    """Progress until it ends. Exit status 1 unless everything is there."""
    settings = Settings.load()
    _end(follow(settings, ask(settings.stager_socket, WaitJob(job), expect=JobReply).job), json)


@app.command("cancel")
def cancel(job: JobId, json: AsJson = False) -> None:
    """Call a job off. What it brought stays until its room is needed."""
    found = ask(Settings.load().stager_socket, CancelJob(job), expect=JobReply).job
    render.print_json(found) if json else print_job(found)


@app.command("retry")
def retry(job: JobId, json: AsJson = False) -> None:
    """Try the shards that failed again."""
    _end(ask(Settings.load().stager_socket, RetryJob(job), expect=JobReply).job, json)


def _end(job: StageJob, json: bool) -> None:
    render.print_json(job) if json else print_job(job)
    if ended_badly(job):
        raise typer.Exit(1)
