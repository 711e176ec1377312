"""`forebay top`: what this node does now, in a terminal of 80 columns."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from forebay.api.client import Client
from forebay.api.commands import render
from forebay.api.commands.staging import AsJson
from forebay.api.dashboard.figures import Bar, bar, rank_rows, save_rows
from forebay.api.resources import Overview
from forebay.core.errors import DaemonUnavailable
from forebay.core.protocol import LEVELS
from forebay.core.units import format_bytes

_COLOURS = {"good": "green", "low": "yellow", "bad": "red"}
_NARROW = 80


def top(
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
    json: AsJson = False,
) -> None:
    """Tiers, flows, jobs, ranks and checkpoints, live until Ctrl-C.

    One look only with --once, with --json, or where stdout is no terminal.
    """
    with Client() as client:
        if json:
            render.print_json(client.overview())
        elif once or not sys.stdout.isatty():
            Console(width=_NARROW).print(picture(client.overview(), None))
        else:
            _watch(client, interval)


def _watch(client: Client, interval_s: float) -> None:
    ended = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: ended.set())
    before: Overview | None = None
    with Live(screen=True, auto_refresh=False) as live:
        while not ended.is_set():
            try:
                now = client.overview()
                live.update(picture(now, before), refresh=True)
                before = now
            except DaemonUnavailable as err:
                live.update(Text(str(err), style="red"), refresh=True)
            ended.wait(interval_s)


def picture(now: Overview, before: Overview | None) -> RenderableType:
    """`before`: the look whose counters rates are taken from."""
    parts: list[RenderableType] = [
        Text(f"{now.node}  forebay {now.version}  {render.clock(now.at)}", style="bold")
    ]
    parts += [Text(f"{name} is away: {why.detail}", style="red") for name, why in now.away.items()]
    parts += [_tiers(now, before), _ranks(now), _jobs(now), _saves(now)]
    if now.problems:
        parts.append(_problems(now))
    return Group(*parts)


def _grid(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold cyan", box=None, pad_edge=False, expand=True
    )
    for column in columns:
        table.add_column(
            column.strip("> "), justify="right" if column.startswith(">") else "left", no_wrap=True
        )
    return table


def _tiers(now: Overview, before: Overview | None) -> RenderableType:
    table = _grid("TIERS", "TIER", ">HELD", ">OF", "", ">FETCHED", ">RATE")
    if now.tiers is None:
        return table
    earlier = before.tiers if before else None
    seconds = now.at - before.at if before else 0.0

    def rate(value: int, then: int | None) -> str:
        return (
            f"{format_bytes(int(max(0, value - then) / seconds))}/s"
            if then is not None and seconds > 0
            else ""
        )

    cold, warm, hot = now.tiers.cold, now.tiers.warm, now.tiers.hot
    fetched = rate(cold.fetched_bytes, earlier.cold.fetched_bytes if earlier else None)
    table.add_row("cold", "", "", "", format_bytes(cold.fetched_bytes), fetched)
    if warm:
        fetched = rate(warm.fetched_bytes, earlier.warm.fetched_bytes if earlier and earlier.warm else None)
        table.add_row("warm", "", "", "", format_bytes(warm.fetched_bytes), fetched)
    filled = _bar(bar(hot.held_bytes, hot.capacity_bytes))
    table.add_row("hot", format_bytes(hot.held_bytes), format_bytes(hot.capacity_bytes), filled, "", "")
    read = rate(now.tiers.read_bytes, earlier.read_bytes if earlier else None)
    table.add_row("ranks", "", "", "", format_bytes(now.tiers.read_bytes), read)
    return table


def _ranks(now: Overview) -> RenderableType:
    several = len({rank.node for rank in now.ranks}) > 1
    table = _grid(
        "LOCKSTEP", "NODE RANK" if several else "RANK", ">STEP", "RUNWAY", "", ">WAITED", ">WAITING", ">SKEW"
    )
    for row in rank_rows(now.ranks):
        state = row.rank.state
        name = f"{_short(row.rank.node, 12)} {state.rank}" if several else str(state.rank)
        table.add_row(
            f"{name} late" if row.late else name, str(state.step), _bar(row.runway),
            row.runway_text, f"{row.wait.percent:.1f} %", f"{state.waiting_s:.2f} s",
            f"{100 * state.skew_share:.1f} %",
            style="red" if row.late else "",
        )  # fmt: skip
    return table


def _jobs(now: Overview) -> RenderableType:
    table = _grid("STAGE JOBS", "DATASET", "TIER", "STATE", "", ">SHARDS", ">RATE", "OWNER")
    for job in now.jobs:
        rate = f"{format_bytes(int(job.rate_bps))}/s" if job.state == "running" else ""
        filled = _bar(bar(job.bytes_done, job.bytes_total, kind="bad" if job.failed else "good"))
        done = f"{job.shards_done}/{job.shards_total}"
        table.add_row(_short(job.dataset, 18), job.tier, job.state, filled, done, rate, _short(job.owner, 10))
    return table


def _saves(now: Overview) -> RenderableType:
    table = _grid("CHECKPOINTS", "RUN", ">STEP", ">SIZE", *(f">{level[:9].upper()}" for level in LEVELS))
    for save in save_rows(now.saves):
        counts = [f"{count}/{save.parts}" for _, count in save.reached]
        style = "red" if save.error else ""
        table.add_row(
            _short(save.run, 16), str(save.step), format_bytes(save.size_bytes), *counts, style=style
        )
    return table


def _problems(now: Overview) -> RenderableType:
    table = _grid("RECENT PROBLEMS", "AT", "DAEMON", "WHAT")
    for item in now.problems[:5]:
        what = f"{item.problem.event}: {item.problem.detail}"
        table.add_row(render.clock(item.problem.at)[11:], item.daemon, _short(what, 52))
    return table


def _bar(found: Bar, width: int = 12) -> Text:
    full = round(found.percent * width / 100)
    return Text("█" * full + "░" * (width - full), style=_COLOURS[found.kind])


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
