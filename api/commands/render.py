"""Results on stdout, as a table for people or as JSON for programs; everything else on stderr."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

# Into a file or a pipe a table keeps its lines whole; a terminal folds them.
_WIDE = 250

out = Console(soft_wrap=True, width=None if sys.stdout.isatty() else _WIDE)
err = Console(stderr=True, soft_wrap=True)


def print_json(value: Any) -> None:
    data = msgspec.json.format(msgspec.json.encode(value), indent=2)
    out.print(data.decode(), markup=False, highlight=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    table = Table(*columns, title=title or None, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    out.print(table)


def clock(at: float) -> str:
    return datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S") if at else "-"
