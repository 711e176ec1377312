"""What is lent with an object, and comes back when that object is gone."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Loans(Generic[T]):
    """Not thread-safe, but that objects may end on any thread."""

    def __init__(self) -> None:
        self._lent: dict[int, tuple[weakref.ref[Any], T]] = {}
        # Filled by C code alone: Python code in a callback would swallow a Ctrl-C that arrives there.
        self._ended = deque[weakref.ref[Any]]()

    def lend(self, to: Any, what: T) -> None:
        ref = weakref.ref(to, self._ended.append)
        self._lent[id(ref)] = ref, what

    def take_back(self) -> list[T]:
        """All whose objects have ended since the last call."""
        return [self._lent.pop(id(self._ended.popleft()))[1] for _ in range(len(self._ended))]
