"""The scrubber finds what changed on the disk behind everybody's back, and leaves sound files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from forebay.core.config import Settings
from forebay.core.journal import Journal
from forebay.core.service import boot_id
from forebay.stager.catalog import Catalog, Held
from forebay.stager.disk import HotDisk
from forebay.stager.hot import HotTier
from forebay.stager.pins import Pins
from forebay.stager.plan import PlanBook
from forebay.stager.registry import Registry
from forebay.stager.schema import MIGRATIONS
from forebay.stager.scrubber import Scrubber
from forebay.tiers.digest import digest_bytes

BODY = b"forebay" * 3000


class Losses:
    """Stands for the scheduler: hears that something is gone."""

    def __init__(self) -> None:
        self.heard = 0

    def lost(self) -> None:
        self.heard += 1


class Tier:
    def __init__(self, home: Path) -> None:
        self.journal = Journal(home / "db", MIGRATIONS, durable=False)
        self.catalog = Catalog(self.journal)
        pins = Pins(self.journal, Registry(self.journal, home))
        self.hot = HotTier(Settings(home=home), self.catalog, PlanBook(), pins)
        self.losses = Losses()
        self.scrubber = Scrubber(self.hot, self.catalog, cast(Any, self.losses), 1e9)

    @property
    def disk(self) -> HotDisk:
        return self.hot.disks[0]

    def stage(self, object_id: str) -> Path:
        path = self.disk.path(object_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(BODY)
        held = Held(object_id, self.disk.name, "", len(BODY), 24576, digest_bytes(BODY), boot_id(), 0.0, 0.0)
        self.disk.adopt(held)
        return path

    def scrub(self, before: float = 1.0) -> None:
        anyio.run(self.scrubber._read_again, self.disk, before)


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path)


def test_a_flipped_bit_is_found_put_aside_and_told(tier: Tier):
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
def test_what_is_no_longer_that_file_is_forgotten(tier: Tier, damage: str):
    path = tier.stage("c" * 32)
    path.unlink()
    if damage == "shorter":
        path.write_bytes(BODY[:100])
    elif damage == "a link":
        path.symlink_to("/etc/hostname")
    tier.scrub()
    assert "c" * 32 not in tier.hot and tier.disk.held_bytes == 0
    assert Path("/etc/hostname").exists()


def test_what_was_read_lately_is_not_read_again(tier: Tier):
    tier.stage("d" * 32)
    tier.scrub()
    held = tier.catalog.get("d" * 32)
    assert held and held.verified_at > 1.0
    path = tier.disk.path("d" * 32)
    path.write_bytes(BODY[:-1] + b"\0")
    tier.scrub()
    assert "d" * 32 in tier.hot
