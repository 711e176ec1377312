"""The warm tier, simple form: a directory that the nodes share, read before cold, filled after it.

<warm>/forebay/objects/<aa>/<id>, same names as hot, beside each a `<id>.digest` (xxh3-128), which
is written first. A warm tier that fails is a miss: it is said once, and cold serves.
"""

from __future__ import annotations

import os
from pathlib import Path

import structlog
from anyio import to_thread

from forebay.core.errors import ForebayError
from forebay.stager.manifest import Shard
from forebay.tiers.filesystem import FilesystemStore, temporary_beside
from forebay.tiers.transfer import Fetched, Transfers

log = structlog.get_logger()


class WarmTier:
    def __init__(self, folder: Path, transfers: Transfers) -> None:
        self.folder = folder
        self._store = FilesystemStore(folder / "forebay" / "objects")
        self._transfers = transfers
        self._complained = False

    async def fetch(self, shard: Shard, final: Path) -> Fetched | None:
        """Warm -> hot, verified against the sidecar; None when it is not (or not well) there."""
        key = f"{shard.id[:2]}/{shard.id}"
        try:
            path = self._store.root / key
            if not path.is_file():
                return None
            expected = path.with_name(f"{shard.id}.digest").read_text().strip()
            info = await self._store.head(key)
            fetched = await self._transfers.fetch(self._store, info, final)
        except (ForebayError, OSError) as err:
            self._complain(err)
            return None
        if fetched.digest != expected or fetched.size_bytes != shard.size_bytes:
            log.warning("warm copy is damaged, dropped", object=shard.id)
            final.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            return None
        return fetched

    async def publish(self, shard: Shard, fetched: Fetched) -> None:
        """Hot -> warm, for the other nodes. Losing a race costs double work only."""
        final = self._store.root / shard.id[:2] / shard.id
        try:
            if not final.exists():
                await to_thread.run_sync(_copy, fetched, final)
        except OSError as err:
            self._complain(err)

    def _complain(self, err: Exception) -> None:
        if not self._complained:
            log.warning("warm tier fails, going on without it", folder=str(self.folder), error=str(err))
            self._complained = True


def _copy(fetched: Fetched, final: Path) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(final)
    try:
        with fetched.path.open("rb") as source, temporary.open("xb") as target:
            while os.sendfile(target.fileno(), source.fileno(), None, 16 << 20):
                pass
        digest = final.with_name(f"{final.name}.digest")
        sidecar = temporary.with_name(f"{temporary.name}.digest")
        sidecar.write_text(f"{fetched.digest}\n")
        sidecar.rename(digest)
        temporary.rename(final)
    finally:
        temporary.unlink(missing_ok=True)
