"""The scrubber finds what changed on the disk behind everybody's back, and leaves sound files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from forebay.stager.scrubber import Scrubber
from tests.unit.hot import BODY, Tier


class Losses:
    """Stands for the scheduler: hears that something is gone."""

    def __init__(self) -> None:
        self.heard = 0

    def lost(self) -> None:
        self.heard += 1


class Scrubbed(Tier):
    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.losses = Losses()
        self.scrubber = Scrubber(self.hot, self.catalog, cast(Any, self.losses), 1e9)

    def scrub(self, before: float = 1.0) -> None:
        anyio.run(self.scrubber._read_again, self.disk, before)


@pytest.fixture
def tier(tmp_path: Path) -> Scrubbed:
    return Scrubbed(tmp_path)


def test_a_flipped_bit_is_found_put_aside_and_told(tier: Scrubbed):
    """The time stamps say nothing of it: a disk changes bytes without them."""
    good, bad = tier.stage("a" * 32), tier.stage("b" * 32)
    bad.write_bytes(BODY[:-1] + b"\0")
    tier.scrub()
    assert "b" * 32 not in tier.hot and not bad.exists()
    assert "a" * 32 in tier.hot and good.read_bytes() == BODY
    assert tier.losses.heard == 1
    (aside,) = (tier.disk.folder / "forebay/quarantine").iterdir()
    assert aside.name.startswith("b" * 32)
    assert tier.disk.held_bytes == 24576


@pytest.mark.parametrize("damage", ["shorter", "gone", "a link"])
def test_what_is_no_longer_that_file_is_forgotten(tier: Scrubbed, damage: str):
    path = tier.stage("c" * 32)
    path.unlink()
    if damage == "shorter":
        path.write_bytes(BODY[:100])
    elif damage == "a link":
        path.symlink_to("/etc/hostname")
    tier.scrub()
    assert "c" * 32 not in tier.hot and tier.disk.held_bytes == 0
    assert Path("/etc/hostname").exists()


def test_what_was_read_lately_is_not_read_again(tier: Scrubbed):
    tier.stage("d" * 32)
    tier.scrub()
    held = tier.catalog.get("d" * 32)
    assert held and held.verified_at > 1.0
    path = tier.disk.path("d" * 32)
    path.write_bytes(BODY[:-1] + b"\0")
    tier.scrub()
    assert "d" * 32 in tier.hot
