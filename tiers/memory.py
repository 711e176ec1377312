"""Keep the buffers of transfers: giving them back and touching new pages costs more than the copies."""

from __future__ import annotations

import ctypes

# mallopt(3); glibc refuses a threshold above 32 MiB on 64-bit machines.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_FROM_HEAP_BYTES = 32 << 20
_ARENAS = 2


def keep_freed_memory(most_bytes: int) -> None:
    """For a daemon: up to `most_bytes` of freed heap stay with the process. No glibc, no effect."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, min(most_bytes, 2**31 - 1))
        mallopt(_M_ARENA_MAX, _ARENAS)
