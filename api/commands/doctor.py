"""`forebay doctor` and `forebay nccl-topo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from forebay.api.commands import render
from forebay.api.commands.staging import AsJson
from forebay.api.doctor import topology
from forebay.api.doctor.disks import check_disks
from forebay.api.doctor.finding import LEVELS, Finding, Node
from forebay.api.doctor.gpus import check_gpus
from forebay.api.doctor.host import check_clock, check_limits, check_memory
from forebay.api.doctor.network import check_interfaces, check_kernel
from forebay.api.doctor.sources import check_sources
from forebay.core.config import Settings

Check = Callable[[Node], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    check_disks,
    check_limits,
    check_memory,
    check_clock,
    check_sources,
    check_interfaces,
    check_kernel,
    check_gpus,
)
_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red"}


class Rate:
    """Bytes per second on the command line: `4GB/s`."""

    def __init__(self, text: str) -> None:
        try:
            self.bps = int(TypeAdapter(ByteSize).validate_python(text.removesuffix("/s")))
        except ValidationError as err:
            raise typer.BadParameter(f"{text!r} is no rate, for example 4GB/s") from err


def examine(node: Node, checks: tuple[Check, ...] = CHECKS) -> list[Finding]:
    """What all checks found, in their order. One that breaks is itself a finding."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(node)
        except OSError as err:
            found.append(
                Finding(check.__name__.removeprefix("check_"), "note", f"could not be checked: {err}")
            )
    return found


def doctor(
    need: Annotated[
        Rate | None, typer.Option(parser=Rate, help="Bytes per second that this node's ranks read: 4GB/s.")
    ] = None,
    source: Annotated[list[str] | None, typer.Option(help="Also check this URL; may be given often.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure no disk.")] = False,
    json: AsJson = False,
) -> None:
    """Check this node before it trains, and say what to change. Exit status 1 when a job would suffer."""
    node = Node(Settings.load(), need.bps if need else 0, tuple(source or ()), quick)
    findings = examine(node)
    if json:
        render.print_json(findings)
    else:
        for finding in findings:
            _print(finding)
        counts = {level: sum(f.level == level for f in findings) for level in LEVELS}
        render.out.print(", ".join(f"{count} {level}" for level, count in counts.items() if count))
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)


def _print(finding: Finding) -> None:
    colour = _COLOURS[finding.level]
    render.out.print(f"[{colour}]{finding.level:>4}[/]  {finding.check:<12}", end=" ", highlight=False)
    render.out.print(finding.what, markup=False, highlight=False)
    for word, text in (("why", finding.why), ("do", finding.fix)):
        if text:
            render.out.print(f"{'':19}{word}: {text}", style="dim", markup=False, highlight=False)


def nccl_topo(
    file: Annotated[
        Path | None, typer.Argument(help="Check this file; without one, write one to stdout.")
    ] = None,
    json: AsJson = False,
) -> None:
    """NCCL's topology file: written from this machine, or compared with it.

    The variables that belong to it go to stderr. Exit status 1 when a file would mislead NCCL.
    """
    if file is None:
        _write(json)
        return
    found = list(topology.check_file(file))
    if json:
        render.print_json({"file": str(file), "disagreements": found, "variables": topology.variables(file)})
    else:
        for item in found:
            render.out.print(f"{'wrong' if item.wrong else 'differs'}: {item.what}", markup=False)
        if not found:
            render.out.print(f"{file} agrees with this machine")
    if any(item.wrong for item in found):
        raise typer.Exit(1)


def _write(json: bool) -> None:
    text, names = topology.write(), topology.variables(Path("FILE"))
    if json:
        render.print_json({"xml": text, "variables": names})
        return
    render.out.print(text, end="", markup=False, highlight=False)
    if not any(device.is_gpu for device in topology.devices()):
        render.err.print("this machine shows no GPU", style="yellow")
    for name, value in names.items():
        render.err.print(f"export {name}={value}", markup=False, highlight=False)
