"""Libraries that only some formats need."""

from __future__ import annotations

import importlib
from typing import Any

from forebay.core.errors import InvalidRequest


def need(module: str, extra: str) -> Any:
    """Raises InvalidRequest, which says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as err:
        raise InvalidRequest(f"{module} is not installed", hint=f"pip install 'forebay[{extra}]'") from err
