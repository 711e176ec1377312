"""Secrets in text: what a log, an error, a metric or a page shows never holds one.

Credentials in URLs (RFC 3986, userinfo), signatures and tokens in their queries, bearer tokens.
"""

from __future__ import annotations

import re
from typing import Any

_RULES = (
    (re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@'\"]+@"), r"\1***@"),
    (
        re.compile(r"(?i)([?&;](?:[\w-]*(?:signature|token|secret|password|credential|key)|sig)=)[^&\s'\"]+"),
        r"\1***",
    ),
    (re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]+"), r"\1***"),
    (re.compile(r"\bfb_[0-9a-f]{12}_[\w-]+"), "fb_***"),
)


def redacted(text: str) -> str:
    """The same text with `***` for what nobody should read."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def redact_all(value: Any) -> Any:
    """Every text inside lists and mappings."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {key: redact_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_all(item) for item in value]
    return value
