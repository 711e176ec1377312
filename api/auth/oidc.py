"""JSON Web Tokens of an OpenID provider (RFC 7519, OpenID Connect Discovery 1.0).

Keys are fetched from the issuer and kept; a key id that is not known is looked up again, but not for
every bad token that somebody sends.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import anyio
import httpx
import jwt

from forebay.api.auth.principal import Principal, scopes_of
from forebay.api.trust import trust
from forebay.core.config import OidcSettings
from forebay.core.errors import DaemonUnavailable, Unauthorized

# Asymmetric only: with a shared secret whoever checks could also sign.
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_KEPT_S = 600.0
_AGAIN_S = 10.0
_TIMEOUT_S = 5.0
_LEEWAY_S = 30.0


class Oidc:
    """Belongs to one event loop."""

    def __init__(self, settings: OidcSettings) -> None:
        self._settings = settings
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at = float("-inf")
        self._lock = anyio.Lock()

    async def check(self, text: str) -> Principal:
        """Whose token it is. Raises Unauthorized; DaemonUnavailable while the issuer does not answer."""
        try:
            header = jwt.get_unverified_header(text)
            key = await self._key(str(header.get("kid", "")))
            claims = jwt.decode(
                text,
                key,
                algorithms=_ALGORITHMS,
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as err:
            raise Unauthorized(f"this token is not valid: {err}") from err
        return self._principal(claims)

    def _principal(self, claims: Mapping[str, Any]) -> Principal:
        roles = _claim(claims, self._settings.roles_claim)
        held = roles.split() if isinstance(roles, str) else roles if isinstance(roles, list) else []
        scopes = {scope for role in held for scope in self._settings.roles.get(str(role), ())}
        tenant = None
        if self._settings.tenant_claim:
            found = _claim(claims, self._settings.tenant_claim)
            if not isinstance(found, str) or not found:
                raise Unauthorized(f"this token names no tenant in {self._settings.tenant_claim!r}")
            tenant = found
        return Principal(f"oidc:{claims['sub']}", scopes_of(scopes), tenant)

    async def _key(self, kid: str) -> jwt.PyJWK:
        async with self._lock:
            age_s = time.monotonic() - self._fetched_at
            if age_s > _KEPT_S or (kid not in self._keys and age_s > _AGAIN_S):
                await self._fetch()
        if kid not in self._keys:
            raise Unauthorized("this token is signed with a key that its issuer does not publish")
        return self._keys[kid]

    async def _fetch(self) -> None:
        issuer = self._settings.issuer.rstrip("/")
        verify = trust(self._settings.ca_file, of="api.oidc.")
        try:
            async with httpx.AsyncClient(timeout=_TIMEOUT_S, verify=verify) as web:
                found = await web.get(f"{issuer}/.well-known/openid-configuration")
                place = str(found.raise_for_status().json()["jwks_uri"])
                keys = (await web.get(place)).raise_for_status().json()
        except (httpx.HTTPError, ValueError, KeyError) as err:
            if self._keys:
                # What it said last still holds; asked again after a while.
                self._fetched_at = time.monotonic() - _KEPT_S + _AGAIN_S
                return
            raise DaemonUnavailable(f"the issuer {issuer} gives no keys: {err}", hint="try again") from err
        self._keys = _signing_keys(keys)
        self._fetched_at = time.monotonic()


def _signing_keys(document: Any) -> dict[str, jwt.PyJWK]:
    """What can be used; a provider may publish kinds of keys that nobody here knows."""
    found: dict[str, jwt.PyJWK] = {}
    for key in document.get("keys", []) if isinstance(document, dict) else []:
        if key.get("use", "sig") == "sig" and key.get("kty") in ("RSA", "EC", "OKP"):
            try:
                found[str(key.get("kid", ""))] = jwt.PyJWK(key)
            except jwt.PyJWTError:
                continue
    return found


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """`realm_access.roles` is a claim within a claim; a whole name that has dots in it comes first."""
    if path in claims:
        return claims[path]
    value: Any = claims
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
