"""Who asks: a name, scopes, and the tenant that they are bound to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from forebay.core.config import ScopeName
from forebay.core.errors import Forbidden, InvalidRequest

Scope = ScopeName
SCOPES: tuple[Scope, ...] = get_args(Scope)


def scopes_of(names: Iterable[str]) -> frozenset[Scope]:
    """Each scope holds the ones before it: who may stage may read. Raises InvalidRequest."""
    given = set(names)
    if unknown := given - set(SCOPES):
        raise InvalidRequest(f"unknown scope {sorted(unknown)[0]!r}", hint=f"one of {', '.join(SCOPES)}")
    highest = max((SCOPES.index(scope) for scope in SCOPES if scope in given), default=-1)
    return frozenset(SCOPES[: highest + 1])


@dataclass(frozen=True)
class Principal:
    """`tenant`: None sees everything. `local`: the daemons' own user, who could use their sockets too."""

    name: str
    scopes: frozenset[Scope]
    tenant: str | None = None
    local: bool = False

    def require(self, scope: Scope) -> None:
        """Raises Forbidden."""
        if scope not in self.scopes:
            has = ", ".join(s for s in SCOPES if s in self.scopes) or "nothing"
            raise Forbidden(f"{self.name} may {has}, this needs the scope {scope!r}")

    def sees(self, tenant: str) -> bool:
        return self.tenant is None or self.tenant == tenant


OWNER = Principal("owner", frozenset(SCOPES), local=True)
ANONYMOUS = Principal("anonymous", frozenset(SCOPES))
