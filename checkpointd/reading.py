"""What is being restored here: retention leaves it alone, on every tier (C5)."""

from __future__ import annotations

import anyio


class Reading:
    """`lock` excludes retention while a checkpoint is chosen; what was chosen is held from then on.

    Held by connection, and as long as that: a reader that dies holds nothing.
    """

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        self._held: dict[int, set[tuple[str, int, str]]] = {}

    def hold(self, session: int, run: str, step: int, attempt: str) -> None:
        self._held.setdefault(session, set()).add((run, step, attempt))

    def left(self, session: int) -> None:
        self._held.pop(session, None)

    def of_run(self, run: str) -> set[tuple[int, str]]:
        """(step, attempt) of what is held."""
        return {(step, attempt) for held in self._held.values() for of, step, attempt in held if of == run}
