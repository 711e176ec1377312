"""Pins: shards that stay whatever is evicted, each with an owner and perhaps an end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.core.errors import NotFound
from forebay.core.journal import Journal
from forebay.core.protocol import Pin
from forebay.core.units import format_bytes
from forebay.stager.manifest import Manifest
from forebay.stager.registry import Registry


class _Live(msgspec.Struct):
    pin: Pin
    numbers: npt.NDArray[np.int64] | None


class Pins:
    """Kept in the journal, so that they outlive the daemon. `on_change` hears of every change."""

    def __init__(self, journal: Journal, registry: Registry) -> None:
        self._journal = journal
        self._registry = registry
        self.on_change: Callable[[], None] = lambda: None
        self._live: dict[str, _Live] = {}
        for row in journal.rows("SELECT * FROM pins"):
            pin = Pin(row["id"], row["owner"], row["dataset_id"], row["made_at"], row["expires_at"])
            raw = row["selection"]
            self._live[pin.id] = _Live(pin, None if raw is None else np.frombuffer(raw, np.int64))

    def add(
        self, owner: str, dataset_id: str, numbers: npt.NDArray[np.int64] | None, ttl_s: float | None
    ) -> Pin:
        """Of a whole dataset, or of the shards with these numbers; until dropped, or for `ttl_s`."""
        self._registry.manifest(dataset_id)
        now = time.time()
        pin = Pin(secrets.token_hex(6), owner, dataset_id, now, None if ttl_s is None else now + ttl_s)
        chosen = None if numbers is None else np.sort(numbers)
        self._journal.run(
            "INSERT INTO pins VALUES (?,?,?,?,?,?)",
            pin.id, owner, dataset_id, None if chosen is None else chosen.tobytes(), now, pin.expires_at,
        )  # fmt: skip
        self._live[pin.id] = _Live(pin, chosen)
        self.on_change()
        return pin

    def drop(self, pin_id: str) -> None:
        """Raises NotFound."""
        if pin_id not in self._live:
            raise NotFound(f"there is no pin {pin_id!r}", hint="`forebay pin --list` shows them")
        self._forget(pin_id)

    def bytes_besides(self, dataset_id: str, numbers: npt.NDArray[np.int64]) -> int:
        """What pins hold that is not among these shards."""
        self._expire()
        own = self._registry.manifest(dataset_id)
        total = 0
        for live in self._live.values():
            if manifest := self._manifest(live.pin):
                pinned = np.arange(len(manifest)) if live.numbers is None else live.numbers
                if manifest is own:
                    pinned = np.setdiff1d(pinned, numbers)
                total += int(manifest.sizes_bytes[pinned].sum())
        return total

    def all(self) -> list[Pin]:
        self._expire()
        return [
            msgspec.structs.replace(live.pin, tenant=self._tenant(live.pin)) for live in self._live.values()
        ]

    def _tenant(self, pin: Pin) -> str:
        try:
            return self._registry.find(pin.dataset_id).tenant
        except NotFound:
            return ""

    def holds(self, object_id: str) -> bool:
        self._expire()
        for live in self._live.values():
            manifest = self._manifest(live.pin)
            number = manifest.number_of(object_id) if manifest else None
            if number is not None and (live.numbers is None or _contains(live.numbers, number)):
                return True
        return False

    def _manifest(self, pin: Pin) -> Manifest | None:
        """None when it is lost: then nobody can say any more what was pinned."""
        try:
            return self._registry.manifest(pin.dataset_id)
        except NotFound:
            return None

    def explain(self) -> str:
        """What is pinned, by owner; empty when nothing is."""
        self._expire()
        owners = []
        for live in self._live.values():
            if manifest := self._manifest(live.pin):
                sizes = manifest.sizes_bytes
                held = sizes if live.numbers is None else sizes[live.numbers]
                owners.append(f"{format_bytes(int(held.sum()))} by {live.pin.owner}")
        return f"pinned {', '.join(owners)}, " if owners else ""

    def _expire(self) -> None:
        now = time.time()
        for pin_id in [p for p, live in self._live.items() if (live.pin.expires_at or now + 1) <= now]:
            self._forget(pin_id)

    def _forget(self, pin_id: str) -> None:
        del self._live[pin_id]
        self._journal.run("DELETE FROM pins WHERE id=?", pin_id)
        self.on_change()


def _contains(numbers: npt.NDArray[np.int64], number: int) -> bool:
    place = int(np.searchsorted(numbers, number))
    return place < len(numbers) and numbers[place] == number
