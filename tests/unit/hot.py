"""A hot tier of one disk with its catalog, without a daemon around it."""

from __future__ import annotations

from pathlib import Path

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
from forebay.tiers.digest import digest_bytes

BODY = b"forebay" * 3000


class Tier:
    def __init__(self, home: Path) -> None:
        self.journal = Journal(home / "db", MIGRATIONS, durable=False)
        self.catalog = Catalog(self.journal)
        pins = Pins(self.journal, Registry(self.journal, home))
        self.hot = HotTier(Settings(home=home), self.catalog, PlanBook(), pins)

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
