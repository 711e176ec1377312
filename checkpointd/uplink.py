"""What checkpointd may move: stagerd grants it out of the node's one budget; alone, the same rate holds.

Asked in slices of about a part, so that what a rank waits for goes between them.
"""

from __future__ import annotations

import time
from functools import partial

import anyio
import structlog
from anyio import to_thread

from forebay.core.channel import ask
from forebay.core.config import Settings
from forebay.core.errors import ForebayError
from forebay.core.protocol import Done, TakeBandwidth
from forebay.tiers.budget import TokenBucket

log = structlog.get_logger()

_LONGEST_S = 60.0
# After stagerd did not answer it is left alone for a while.
_ALONE_S = 30.0


class Uplink:
    """Nothing is asked for when `network.rate` sets no limit."""

    def __init__(self, settings: Settings) -> None:
        self._socket = settings.stager_socket
        self._rate = TokenBucket(settings.network.rate)
        self._alone = anyio.Lock()
        self._alone_until = 0.0

    async def drain(self, size_bytes: int) -> None:
        """Returns when that much of a checkpoint may go up."""
        await self._take(TakeBandwidth(size_bytes))

    async def restore(self, size_bytes: int) -> None:
        """Returns when that much of a checkpoint may come down."""
        await self._take(TakeBandwidth(size_bytes, restore=True))

    async def _take(self, request: TakeBandwidth) -> None:
        if not self._rate.rate_bps:
            return
        if time.monotonic() >= self._alone_until:
            asked = partial(ask, self._socket, request, expect=Done, role="checkpointd", timeout_s=_LONGEST_S)
            try:
                await to_thread.run_sync(asked, abandon_on_cancel=True)
                return
            except ForebayError as err:
                # Several parts may have asked at once: said once.
                if time.monotonic() >= self._alone_until:
                    log.info("stagerd grants nothing, keeping to the rate alone", error=str(err))
                    self._alone_until = time.monotonic() + _ALONE_S
        async with self._alone:
            await anyio.sleep(self._rate.opens_in_s())
            self._rate.take(request.size_bytes)
