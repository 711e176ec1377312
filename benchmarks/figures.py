"""docs/figures.md from the JSON files that benches wrote: figures are data, never typed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from forebay.benchmarks.report import Report

_COMMANDS = {
    "checkpoint": "Save, drain, upload and restore, beside plain copies, the disk alone and torch.",
    "loader": "Samples per second from staged shards, hot, beside other loaders on the same files.",
    "lockstep": "Four ranks on two nodes, a source that slows down: time over its bound, skew of the waits.",
    "staging": "Cold to hot through stagerd, every MD5 checked, beside other clients on the same objects.",
    "api": "Requests per second on one core, latency beside staging, a job's first byte; the dashboard.",
    "eviction": "Hit ratios of stagerd's own evictor beside other policies and the optimum, same traces.",
    "stager": "Scale, hand-over of descriptors, demands beside a stage job, bytes from cold for four nodes.",
}


def render(files: list[Path]) -> str:
    """Markdown: one section per bench, in the order given."""
    parts = [
        "# Figures\n",
        "Made by `forebay bench figures` from `docs/figures/*.json`; not edited by hand. Ratios count, "
        "absolute numbers are those of a small virtual machine.\n",
    ]
    for file in files:
        report = msgspec.json.decode(file.read_bytes(), type=Report)
        parts.append(_section(report, file))
    return "\n".join(parts)


def _section(report: Report, file: Path) -> str:
    host = report.host
    lines = [
        f"## forebay bench {report.bench}\n",
        f"{_COMMANDS.get(report.bench, '')}\n",
        f"`forebay bench {report.bench} --json docs/figures/{file.name}`; {report.at[:10]}, version "
        f"{report.version}, {host.cores} cores, {host.memory_bytes / 2**30:.0f} GiB, {host.fs}\n",
    ]
    for case in report.cases:
        lines += [f"**{case.case}.** {case.note}\n", "| figure | value |", "|---|---|"]
        lines += [f"| `{key}` | {_number(value)} |" for key, value in case.figures.items()]
        lines += [
            f"| {name}: `{key}` | {_number(value)} |"
            for name, peer in case.peers.items()
            for key, value in peer.items()
        ]
        lines.append("")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
