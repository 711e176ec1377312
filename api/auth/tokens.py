"""Bearer tokens of this node: 256 random bits each, of which only a digest is kept.

A token reads `fb_<id>_<secret>`. With so much chance in it a plain SHA-256 is enough: there is no dictionary
to try (NIST SP 800-63B, 5.1.2.2, look-up secrets of at least 112 bits).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from pathlib import Path

import msgspec

from forebay.api.auth.principal import Principal, Scope, scopes_of
from forebay.core.errors import InvalidRequest, NotFound, Unauthorized
from forebay.core.journal import Journal

_MIGRATIONS = (
    """
    CREATE TABLE tokens (
        id TEXT PRIMARY KEY, digest BLOB NOT NULL, name TEXT NOT NULL, scopes TEXT NOT NULL, tenant TEXT,
        made_at REAL NOT NULL, expires_at REAL);
    """,
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_TOKEN = re.compile(r"fb_([0-9a-f]{12})_([\w-]{43})")


class Token(msgspec.Struct, frozen=True):
    """What is known of a token; never the token. Times are seconds since the epoch."""

    id: str
    name: str
    scopes: list[Scope]
    tenant: str | None
    made_at: float
    expires_at: float | None


class TokenBook:
    """One file, shared by the API and the command line; a change holds from the next request on."""

    def __init__(self, home: Path) -> None:
        folder = home / "api"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._journal = Journal(folder / "tokens.db", _MIGRATIONS, durable=True)
        os.chmod(self._journal.path, 0o600)

    def create(
        self, name: str, scopes: list[str], tenant: str | None = None, ttl_s: float | None = None
    ) -> tuple[Token, str]:
        """The token is told this once. Raises InvalidRequest."""
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{name!r} cannot name a token", hint="letters, digits and . _ @ -")
        held = scopes_of(scopes)
        if not held:
            raise InvalidRequest("a token without a scope may nothing", hint="--scope read, stage or admin")
        if ttl_s is not None and ttl_s <= 0:
            raise InvalidRequest("a token cannot expire before it was made")
        now = time.time()
        token = Token(
            secrets.token_hex(6), name, sorted(held), tenant, now, None if ttl_s is None else now + ttl_s
        )
        secret = secrets.token_urlsafe(32)
        self._journal.run(
            "INSERT INTO tokens VALUES (?,?,?,?,?,?,?)",
            token.id, _digest(secret), name, " ".join(token.scopes), tenant, now, token.expires_at,
        )  # fmt: skip
        return token, f"fb_{token.id}_{secret}"

    def check(self, text: str) -> Principal:
        """Whose token it is. Raises Unauthorized, with the same words whatever is wrong but its age."""
        match = _TOKEN.fullmatch(text)
        row = self._journal.row("SELECT * FROM tokens WHERE id=?", match[1]) if match else None
        if row is None or match is None or not hmac.compare_digest(row["digest"], _digest(match[2])):
            raise Unauthorized("this token is not known here")
        if row["expires_at"] is not None and row["expires_at"] <= time.time():
            raise Unauthorized(f"the token {row['name']!r} has expired")
        return Principal(row["name"], scopes_of(row["scopes"].split()), row["tenant"])

    def all(self) -> list[Token]:
        return [
            Token(r["id"], r["name"], r["scopes"].split(), r["tenant"], r["made_at"], r["expires_at"])
            for r in self._journal.rows("SELECT * FROM tokens ORDER BY made_at")
        ]

    def revoke(self, id_or_name: str) -> int:
        """How many: a name may stand for several. Raises NotFound."""
        gone = self._journal.run("DELETE FROM tokens WHERE id=? OR name=?", id_or_name, id_or_name)
        if not gone:
            raise NotFound(f"there is no token {id_or_name!r}", hint="`forebay token ls` shows them")
        return gone

    def close(self) -> None:
        self._journal.close()


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
