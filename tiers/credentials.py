"""AWS credentials that obstore does not find by itself: profiles of the AWS configuration files.

obstore takes keys and session tokens from the environment, web identity tokens, container and
instance metadata, and refreshes what expires. A profile (AWS_PROFILE, `profile` of a source, or the
default one) may be static keys, SSO, a role to assume or a process: botocore knows them all, and
renews them ahead of their end. https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from forebay.core.errors import AccessDenied, ConfigError

# How long obstore may keep what it was given; botocore renews 10 to 15 minutes before the end.
_KEEP = timedelta(minutes=5)
_FROM_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def credential_provider(profile: str | None) -> Callable[[], dict[str, Any]] | None:
    """What obstore asks for credentials, or None when its own ways will do.

    Raises ConfigError when a profile is named and botocore is not installed.
    """
    profile = profile or os.environ.get("AWS_PROFILE")
    if profile is None and (any(name in os.environ for name in _FROM_ENVIRONMENT) or not _has_files()):
        return None
    try:
        from botocore.session import Session
    except ImportError as err:
        if profile is None:
            return None
        raise ConfigError(f"profile {profile!r} needs botocore", hint="pip install 'forebay[aws]'") from err
    session = Session(profile=profile)

    def provide() -> dict[str, Any]:
        found = session.get_credentials()
        if found is None:
            raise AccessDenied(f"no AWS credentials in profile {profile or 'default'!r}")
        keys = found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + _KEEP,
        }

    return provide


def _has_files() -> bool:
    places = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    return any(Path(place).expanduser().is_file() for place in places)
