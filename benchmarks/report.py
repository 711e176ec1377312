"""What a bench prints and writes: one shape for all (DESIGN, section 9)."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from forebay.api.doctor.disks import mount_of


class Case(msgspec.Struct):
    case: str
    figures: dict[str, float]
    peers: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    note: str = ""


class Host(msgspec.Struct):
    cores: int
    memory_bytes: int
    kernel: str
    fs: str


class Report(msgspec.Struct):
    """`figures` holds the headline keys; where there are several cases, of the worst one."""

    bench: str
    figures: dict[str, float]
    cases: list[Case]
    seed: int = 0
    version: str = msgspec.field(default_factory=lambda: version("forebay"))
    at: str = msgspec.field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )
    host: Host = msgspec.field(default_factory=lambda: _host())

    def publish(self, path: Path | None) -> None:
        """A table on stdout, JSON in the file."""
        table = Table("FIGURE", "VALUE", title=f"forebay bench {self.bench}", title_justify="left", box=None)
        for key, value in self.figures.items():
            table.add_row(key, f"{value:,.4g}" if value < 1000 else f"{value:,.0f}")
        Console().print(table)
        for case in self.cases:
            _print_case(case)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def _print_case(case: Case) -> None:
    """Ours and the peers side by side, where there are peers."""
    if not case.peers:
        return
    keys = sorted({key for peer in case.peers.values() for key in peer})
    table = Table(case.case, *keys, title_justify="left", box=None)
    mine = [case.figures.get(f"forebay_{key}", case.figures.get(key)) for key in keys]
    for name, row in (("forebay", mine), *((n, [p.get(k) for k in keys]) for n, p in case.peers.items())):
        table.add_row(name, *("" if value is None else f"{value:,.4g}" for value in row))
    Console().print(table)


def _host() -> Host:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    mount = mount_of(Path("/proc/self/mountinfo").read_text(), Path.cwd())
    return Host(os.cpu_count() or 1, memory_bytes, platform.release(), mount.kind if mount else "unknown")
