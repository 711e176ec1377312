"""The sessions of a mixture as one: shards are numbered through."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from forebay.core.protocol import Dataset, RankState, Runway
from forebay.loaders.mixing.order import bases_of
from forebay.loaders.session import MappedShard, StagerSession

SEPARATOR = ","


class MixedSession:
    """`shares` add up to one."""

    def __init__(self, sessions: Sequence[StagerSession], shares: Sequence[float]) -> None:
        self.sessions = sessions
        self._shares = shares
        self._bases = bases_of(session.shards for session in sessions)
        self.dataset = _combined([session.dataset for session in sessions])

    @property
    def shards(self) -> int:
        return sum(session.shards for session in self.sessions)

    @property
    def socket(self) -> Path:
        return self.sessions[0].socket

    @property
    def closed(self) -> bool:
        return self.sessions[0].closed

    @property
    def waits_for(self) -> str:
        return next((session.waits_for for session in self.sessions if session.waits_for), "")

    @property
    def reconnecting(self) -> bool:
        return any(session.reconnecting for session in self.sessions)

    def size_bytes(self, shard: int) -> int:
        session, base = self._of(shard)
        return session.size_bytes(shard - base)

    def open_plan(self, shards: Sequence[int], window: int) -> None:
        """Of one dataset; those of the others stay."""
        session, base = self._of(shards[0])
        session.open_plan([shard - base for shard in shards], window)

    def need(self, shard: int, position: int | None = None) -> MappedShard:
        session, base = self._of(shard)
        found = session.need(shard - base, position)
        found.number, found.part = shard, self.sessions.index(session)
        return found

    def advance(self, shard: int, position: int) -> None:
        session, base = self._of(shard)
        session.advance(shard - base, position)

    def pace(self, keep_bytes: int | None, state: RankState | None = None) -> Runway:
        """Of the dataset whose bytes last shortest, scaled to the whole; as if samples were of one size."""
        found = []
        for session, share in zip(self.sessions, self._shares, strict=True):
            runway = session.pace(None if keep_bytes is None else int(keep_bytes * share), state)
            found.append((runway.ends, runway.ahead_bytes / share, runway))
        ends, ahead_bytes, runway = min(found, key=lambda one: one[:2])
        return Runway(int(ahead_bytes), ends, runway.shard, runway.tier)

    def counts(self) -> list[int]:
        return [count for session in self.sessions for count in session.counts()]

    def close(self) -> None:
        with ExitStack() as ends:
            for session in self.sessions:
                ends.callback(session.close)

    def __enter__(self) -> MixedSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _of(self, shard: int) -> tuple[StagerSession, int]:
        place = bisect.bisect_right(self._bases, shard) - 1
        return self.sessions[place], self._bases[place]


def _combined(parts: Sequence[Dataset]) -> Dataset:
    fingerprint = hashlib.sha256(SEPARATOR.join(part.fingerprint for part in parts).encode()).hexdigest()
    return Dataset(
        id=SEPARATOR.join(part.id for part in parts),
        name=SEPARATOR.join(part.name for part in parts),
        url=" + ".join(part.url for part in parts),
        format=SEPARATOR.join(part.format for part in parts),
        tenant=parts[0].tenant,
        fingerprint=fingerprint,
        shards=sum(part.shards for part in parts),
        size_bytes=sum(part.size_bytes for part in parts),
        largest_bytes=max(part.largest_bytes for part in parts),
    )
