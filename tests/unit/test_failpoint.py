"""Failpoints: each is in the code, armed as told, and a mistake is named."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from forebay.core.errors import ConfigError
from forebay.core.failpoint import POINTS, failpoint, parse

ROOT = Path(__file__).parents[2]


def test_every_point_stands_in_the_code_and_no_other():
    parts = [
        path for part in ("core", "tiers", "stager", "checkpointd") for path in (ROOT / part).glob("*.py")
    ]
    used = re.findall(r'failpoint\("([\w.]+)"\)', "".join(path.read_text() for path in parts))
    assert sorted(used) == sorted(POINTS)


def test_only_the_pass_that_was_named_fails():
    (armed,) = parse("landing.begun=error:ENOSPC@2").values()
    armed.passed()
    with pytest.raises(OSError) as caught:
        armed.passed()
    assert caught.value.errno == errno.ENOSPC
    armed.passed()
    failpoint("landing.begun")


@pytest.mark.parametrize(
    "text", ["nothing=kill", "landing.begun=burn", "landing.begun=error:EWHAT", "landing.begun=delay:x"]
)
def test_a_mistake_is_named(text: str):
    with pytest.raises(ConfigError, match=text.partition("=")[0]):
        parse(text)
