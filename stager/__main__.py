"""A private stagerd for one process: `python -m forebay.stager` with its parent at standard input.

It serves until the pipe at its standard input closes, which the kernel does however the parent
dies; a cache directory that it was told is temporary is gone then (see docs/decisions).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import anyio

from forebay.core.config import Settings
from forebay.core.errors import AlreadyRunning, root_cause
from forebay.core.service import run
from forebay.stager.daemon import Stagerd


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--temporary", action="store_true")
    return parser.parse_args()


async def until_parent_ends(settings: Settings) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Stagerd(settings).main)
        await end_of_input()
        tasks.cancel_scope.cancel()


async def end_of_input() -> None:
    """Waited for in the loop: a thread that reads would keep a process that ends otherwise."""
    pipe = sys.stdin.fileno()
    while True:
        await anyio.wait_readable(pipe)
        if not os.read(pipe, 4096):
            return


def main() -> None:
    args = parse()
    settings = Settings.load(home=args.home)
    try:
        run("stagerd", lambda: until_parent_ends(settings))
    except* AlreadyRunning as errors:
        # Another rank was first with this cache directory: its stagerd serves both.
        print(root_cause(errors), file=sys.stderr)
    finally:
        if args.temporary:
            shutil.rmtree(args.home, ignore_errors=True)


if __name__ == "__main__":
    main()
