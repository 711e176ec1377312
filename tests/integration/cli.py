"""The command line, for tests that type."""

from __future__ import annotations

import subprocess
import sys
import time


def forebay(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        [sys.executable, "-m", "forebay.api.cli", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert not check or run.returncode == 0, run.stderr
    return run


def refused(*args: str) -> str:
    """The one line that a failing command prints, within seconds, and nothing on stdout."""
    began_at = time.monotonic()
    run = forebay(*args, check=False)
    assert time.monotonic() - began_at < 20
    assert run.returncode == 1 and run.stdout == "", (run.returncode, run.stdout, run.stderr)
    assert "Traceback" not in run.stderr and len(run.stderr.strip().splitlines()) == 1, run.stderr
    return run.stderr
