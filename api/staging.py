"""`forebay stage`, `status`, `ls`."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from forebay.api import render
from forebay.api.app import find_dataset, register_dataset
from forebay.core.channel import ask
from forebay.core.config import Settings
from forebay.core.errors import DaemonUnavailable
from forebay.core.protocol import (
    CheckpointStatus,
    Dataset,
    Datasets,
    GetStatus,
    JobReply,
    ListDatasets,
    Register,
    Selection,
    Stage,
    StageJob,
    StagerStatus,
    Target,
    WaitJob,
)
from forebay.core.units import format_bytes

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_POLL_S = 10.0
_TARGETS: tuple[Target, ...] = ("hot", "warm")


Glob = Annotated[str | None, typer.Option(help="Only keys that match, for example 'train-00*'.")]


def stage(
    url: Annotated[str, typer.Argument(help="URL or path of a prefix, or the name of a dataset.")],
    wait: Annotated[bool, typer.Option("--wait", help="Show progress until everything is there.")] = False,
    format: Annotated[
        str, typer.Option(help="Which objects are shards: webdataset, parquet..., raw.")
    ] = "raw",
    name: Annotated[str | None, typer.Option(help="Name for `forebay ls` and loaders.")] = None,
    glob: Glob = None,
    keys: Annotated[Path | None, typer.Option(help="File with one key per line.")] = None,
    sample: Annotated[float | None, typer.Option(help="A share of the shards, 0 to 1.")] = None,
    tier: Annotated[str, typer.Option(help="hot or warm.")] = "hot",
    priority: Annotated[float, typer.Option(help="Share beside other jobs.")] = 1.0,
    within: Annotated[float | None, typer.Option(help="Seconds until it should be there.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it until `forebay unpin`.")] = False,
    owner: Annotated[str | None, typer.Option(help="For whom; default: you.")] = None,
    tenant: Annotated[str, typer.Option(help="Whose quota it counts for.")] = "",
    json: AsJson = False,
) -> None:
    """Bring a dataset, or a part of it, into this node's hot tier."""
    settings = Settings.load()
    target = next((known for known in _TARGETS if known == tier), None)
    if target is None:
        raise typer.BadParameter(f"{tier!r} is not one of {', '.join(_TARGETS)}")
    dataset = _dataset(settings, url, format, name, tenant)
    request = Stage(
        dataset.id,
        Selection(glob, keys.read_text().split() if keys else None, sample),
        target,
        priority,
        within,
        pin,
        owner=owner or getpass.getuser(),
    )
    job = ask(settings.stager_socket, request, expect=JobReply).job
    if wait:
        job = follow(settings, job)
    render.print_json(job) if json else print_job(job)
    if ended_badly(job):
        raise typer.Exit(1)


def print_job(job: StageJob) -> None:
    done = f"{job.shards_done}/{job.shards_total} shards, {format_bytes(job.bytes_done)}"
    render.out.print(f"{job.dataset}: {job.state} ({done}), job {job.id}")
    for key, reason in job.failed.items():
        render.err.print(f"failed: {key}: {reason}", style="red", markup=False)


def ended_badly(job: StageJob) -> bool:
    return job.state in ("partial", "failed", "cancelled")


def _dataset(settings: Settings, url: str, format: str, name: str | None, tenant: str) -> Dataset:
    if "/" in url:
        return register_dataset(settings, Register(url, format, name, tenant=tenant), "cli")
    return find_dataset(settings, url, "cli")


def follow(settings: Settings, job: StageJob) -> StageJob:
    """A progress bar on stderr until it ends."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        SpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=render.err, transient=True) as progress:
        task = progress.add_task(job.dataset, total=job.bytes_total)
        while job.state == "running":
            request = WaitJob(job.id, job.version, _POLL_S)
            job = ask(settings.stager_socket, request, expect=JobReply, timeout_s=_POLL_S + 30).job
            progress.update(task, completed=job.bytes_done)
    return job


def ls(json: AsJson = False) -> None:
    """The datasets that this node knows, and how much of each is staged."""
    settings = Settings.load()
    datasets = ask(settings.stager_socket, ListDatasets(), expect=Datasets).datasets
    if json:
        render.print_json(datasets)
        return
    rows = [
        (
            d.name,
            f"{d.staged_shards}/{d.shards}",
            format_bytes(d.staged_bytes),
            format_bytes(d.size_bytes),
            d.url,
        )
        for d in datasets
    ]
    render.print_table(("NAME", "SHARDS", "STAGED", "SIZE", "URL"), rows)


def status(json: AsJson = False) -> None:
    """What the daemons of this node are doing. Exit status 1 when one is not running."""
    settings = Settings.load()
    stager: StagerStatus | None = None
    checkpoint: CheckpointStatus | None = None
    problems = []
    try:
        stager = ask(settings.stager_socket, GetStatus(), expect=StagerStatus)
    except DaemonUnavailable as err:
        problems.append(str(err))
    try:
        checkpoint = ask(settings.checkpoint_socket, GetStatus(), expect=CheckpointStatus)
    except DaemonUnavailable as err:
        problems.append(str(err))
    if json:
        render.print_json({"stager": stager, "checkpoint": checkpoint})
    else:
        _print_status(stager, checkpoint)
    for problem in problems:
        render.err.print(problem, style="red")
    if problems:
        raise typer.Exit(1)


def _print_status(stager: StagerStatus | None, checkpoint: CheckpointStatus | None) -> None:
    if stager:
        rows = [
            ("hot tier", f"{format_bytes(stager.held_bytes)} of {format_bytes(stager.capacity_bytes)}"),
            ("shards", stager.shards),
            ("in use", format_bytes(stager.leased_bytes)),
            ("being fetched", format_bytes(stager.reserved_bytes)),
            ("connections", stager.sessions),
            ("fetched from cold", format_bytes(stager.fetched_cold_bytes)),
            ("fetched from warm", format_bytes(stager.fetched_warm_bytes)),
            ("fetches, evictions", f"{stager.fetches}, {stager.evictions}"),
            *((f"disk, {disk.state}", disk.folder) for disk in stager.disks),
        ]
        render.print_table(("STAGERD", f"pid {stager.pid}"), rows)
    if checkpoint:
        render.out.print()
        saves = [
            (a.run, a.step, a.rank, a.level, format_bytes(a.size_bytes), a.error or "")
            for a in checkpoint.attempts[:10]
        ]
        title = f"CHECKPOINTD  pid {checkpoint.pid}"
        render.print_table(("RUN", "STEP", "RANK", "LEVEL", "SIZE", ""), saves, title=title)
