"""Taking stock goes on beside fetches and evictions, on disks that fail: nothing of that ends the daemon."""

from __future__ import annotations

import errno
from pathlib import Path

import anyio
import pytest

from forebay.stager import sweep
from forebay.stager.catalog import Catalog, Held
from forebay.stager.manifest import Shard
from forebay.tiers.landing import PARTIAL, RECORD
from forebay.tiers.store import ObjectInfo
from tests.unit.hot import BODY, Tier


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path)


def files(tier: Tier) -> set[str]:
    return {path.name for path in tier.disk.root.rglob("*") if path.is_file()}


class Meanwhile(Catalog):
    """A fetch comes to its end while the sweep asks for something: its part file gets its name."""

    def __init__(self, tier: Tier, part: Path) -> None:
        super().__init__(tier.journal)
        self._part = part

    def get(self, object_id: str) -> Held | None:
        if self._part.exists():
            self._part.rename(self._part.with_name(self._part.name.removeprefix(PARTIAL)))
        return super().get(object_id)


@pytest.mark.parametrize("first", ["a part", "a file"])
def test_a_file_that_is_renamed_under_the_sweep_is_no_trouble(tier: Tier, first: str):
    """What ended the daemon once: looked at after the listing, gone by then."""
    kept, landed = tier.stage("ab" + "0" * 30), "ab" + "1" * 30
    if first == "a part":
        kept.with_name(f"{PARTIAL}ab{'0' * 30}").write_bytes(b"of an earlier life")
    part = kept.with_name(f"{PARTIAL}{landed}")
    part.write_bytes(BODY)
    part.with_name(f"{part.name}{RECORD}").write_bytes(b"ranges")
    anyio.run(sweep.sweep, tier.disk, Meanwhile(tier, part))
    assert kept.name in files(tier)
    assert files(tier) <= {kept.name, landed}


def test_a_link_in_the_place_of_a_folder_is_not_followed(tier: Tier, tmp_path: Path):
    strangers = tmp_path / "strangers"
    strangers.mkdir()
    (strangers / f"{PARTIAL}{'0' * 32}.ranges").write_bytes(b"not ours")
    (tier.disk.root / "ab").symlink_to(strangers)
    anyio.run(sweep.sweep, tier.disk, tier.catalog)
    assert [path.name for path in strangers.iterdir()] == [f"{PARTIAL}{'0' * 32}.ranges"]


def shard(object_id: str) -> Shard:
    return Shard(0, "file:///source", ObjectInfo("key", len(BODY), "1"), object_id)


@pytest.mark.parametrize("call", ["clear", "cancel", "partials", "evict", "quarantine"])
def test_a_disk_that_refuses_to_remove_is_suspect_and_swept_later(
    tier: Tier, call: str, monkeypatch: pytest.MonkeyPatch
):
    held = "ab" + "0" * 30
    tier.stage(held)
    disk, entry = tier.disk, tier.catalog.get(held)
    assert entry

    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    if call == "cancel":
        disk.evict(entry, "wanted")
    elif call == "clear":
        disk.evict(entry)
    else:
        disk.path(held).with_name(f"{PARTIAL}{'c' * 32}").write_bytes(BODY)
        disk.found_partial("c" * 32, 24576)
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "rename", refuse)
    match call:
        case "clear":
            anyio.run(disk.clear)
        case "cancel":
            disk.cancel(shard("wanted"))
        case "partials":
            disk.configure(disk._settings, 24576)
            disk.reserve(shard("wanted"), -1.0, "", 0)
        case "evict":
            disk.evict(entry)
        case _:
            disk.quarantine(entry)
    assert disk.untidy and disk.health.failures > 0
