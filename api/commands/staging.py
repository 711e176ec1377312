"""`forebay stage`, `status`, `ls`."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from forebay.api.client import Client, calls
from forebay.api.commands import render
from forebay.core.protocol import CheckpointStatus, Dataset, StageJob, StagerStatus, Target
from forebay.core.units import format_bytes

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

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
    target = next((known for known in _TARGETS if known == tier), None)
    if target is None:
        raise typer.BadParameter(f"{tier!r} is not one of {', '.join(_TARGETS)}")
    with Client() as client:
        dataset = _dataset(client, url, format, name, tenant)
        job = client.stage(
            dataset.id,
            glob=glob,
            keys=keys.read_text().split() if keys else None,
            sample=sample,
            tier=target,
            priority=priority,
            deadline_s=within,
            pin=pin,
            owner=owner or getpass.getuser(),
        )
        if wait:
            job = follow(client, job)
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


def _dataset(client: Client, url: str, format: str, name: str | None, tenant: str) -> Dataset:
    if "/" in url:
        # A path is this shell's, whatever folder the daemon runs in.
        place = url if "://" in url else str(Path(url).expanduser().absolute())
        return client.register(place, format=format, name=name, tenant=tenant or None)
    return client.dataset(url)


def follow(client: Client, job: StageJob) -> StageJob:
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
        return client.wait(job, lambda now: progress.update(task, completed=now.bytes_done))


def ls(json: AsJson = False) -> None:
    """The datasets that this node knows, and how much of each is staged."""
    with Client() as client:
        datasets = list(client.all(calls.datasets(limit=1000)))
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
    with Client() as client:
        node = client.node()
    if json:
        render.print_json({"stager": node.stager, "checkpoint": node.checkpoint})
    else:
        _print_status(node.stager, node.checkpoint)
    for problem in node.problems.values():
        render.err.print(f"{problem.detail} ({problem.hint})", style="red")
    if node.problems:
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
