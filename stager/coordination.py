"""Who fetches a shard from cold for the whole cluster. Never more than a way to avoid double work:
when it errs, two nodes fetch the same bytes, and both are right.

No clock is compared between nodes: a claim is stale when whoever waits for it has seen no sign of
life for so long by its own clock.
"""

from __future__ import annotations

import secrets
import socket
import time
from abc import ABC, abstractmethod

from forebay.core import redis
from forebay.core.errors import AlreadyExists, ConfigError, ForebayError, ObjectNotFound, StoreUnreachable
from forebay.tiers.store import Store

OWNER = f"{socket.gethostname()}-{secrets.token_hex(6)}"


class Coordinator(ABC):
    """All methods raise kinds of StoreError when they cannot reach what they coordinate through."""

    @abstractmethod
    async def claim(self, name: str) -> bool:
        """True when this process is to do it now."""

    @abstractmethod
    async def beat(self, name: str) -> None:
        """A sign of life of the owner."""

    @abstractmethod
    async def release(self, name: str) -> None:
        """Done, or given up."""

    @abstractmethod
    async def sign(self, name: str) -> str | None:
        """What changes with each sign of life; None when nobody has the claim."""

    @abstractmethod
    async def take_over(self, name: str, seen: str) -> bool:
        """Of an owner who showed nothing but `seen`; True when this process has it now."""


class ClaimFiles(Coordinator):
    """A small object per claim: made with a condition that it is new, rewritten as a sign of life."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._beats = 0

    async def claim(self, name: str) -> bool:
        try:
            await self._store.put(_key(name), self._sign(), if_absent=True)
        except AlreadyExists:
            return False
        return True

    async def beat(self, name: str) -> None:
        await self._store.put(_key(name), self._sign())

    async def release(self, name: str) -> None:
        sign = await self.sign(name)
        if sign is not None and sign.startswith(OWNER):
            await self._store.delete(_key(name))

    async def sign(self, name: str) -> str | None:
        try:
            info = await self._store.head(_key(name))
            return bytes(await self._store.read(info, 0, info.size_bytes)).decode(errors="replace")
        except ObjectNotFound:
            return None
        except ForebayError as err:
            # Rewritten while it was read: a sign of life like any other.
            if err.code in ("object_changed", "short_body"):
                return f"changing-{time.monotonic_ns()}"
            raise

    async def take_over(self, name: str, seen: str) -> bool:
        """Written over, then looked at: of several who do so at once, most often one stays."""
        if await self.sign(name) != seen:
            return False
        mine = self._sign()
        await self._store.put(_key(name), mine)
        return await self.sign(name) == mine.decode()

    def _sign(self) -> bytes:
        self._beats += 1
        return f"{OWNER} {self._beats}".encode()


class RedisClaims(Coordinator):
    """For clusters whose file system is bad at small files: keys with an owner and a time to live.

    https://redis.io/docs/latest/commands/set/ (NX, PX). Valkey is the same.
    """

    _RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
    _BEAT = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end"

    def __init__(self, url: str, stale_s: float) -> None:
        self._redis = redis.connect(url, "warm.coordinator")
        self._url = url.rpartition("@")[2]
        self._stale_ms = int(stale_s * 1000)

    async def claim(self, name: str) -> bool:
        return bool(await self._asked(self._redis.set(_redis_key(name), OWNER, nx=True, px=self._stale_ms)))

    async def beat(self, name: str) -> None:
        await self._asked(self._redis.eval(self._BEAT, 1, _redis_key(name), OWNER, self._stale_ms))

    async def release(self, name: str) -> None:
        await self._asked(self._redis.eval(self._RELEASE, 1, _redis_key(name), OWNER))

    async def sign(self, name: str) -> str | None:
        """The server lets a silent owner's key go, so any sign is a sign of life."""
        owner = await self._asked(self._redis.get(_redis_key(name)))
        return None if owner is None else f"{owner!r} {time.monotonic_ns()}"

    async def take_over(self, name: str, seen: str) -> bool:
        return await self.claim(name)

    async def _asked(self, call: object) -> object:
        try:
            with redis.as_os_errors():
                return await call  # type: ignore[misc]
        except OSError as err:
            raise StoreUnreachable(f"{self._url}: {err}", hint="check warm.coordinator") from err


def open_coordinator(setting: str, store: Store, stale_s: float) -> Coordinator:
    """Raises ConfigError for a setting that is neither `claims` nor a Redis URL."""
    if setting == "claims":
        return ClaimFiles(store)
    if setting.startswith(("redis://", "rediss://", "valkey://", "unix://")):
        return RedisClaims(setting.replace("valkey://", "redis://"), stale_s)
    raise ConfigError(f"warm.coordinator is {setting!r}", hint="`claims`, or redis://host:port")


def _key(name: str) -> str:
    return f"claims/{name[:2]}/{name}"


def _redis_key(name: str) -> str:
    return f"forebay/{_key(name)}"
