"""What the writer and the reader call things, in a file's metadata and as a checkpoint's id."""

from __future__ import annotations

import os

from forebay.core.errors import InvalidRequest

# Names that torch's HuggingFaceStorageReader looks for (torch/distributed/checkpoint/_hf_utils.py).
SHARDING = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"
# Ours: what is no tensor, by name.
OBJECTS = "forebay_objects"


def step_of(checkpoint_id: str | os.PathLike[str] | None, default: int | None) -> int | None:
    """`"100"`, `"step-100"`, or a path that ends so. Raises InvalidRequest."""
    if checkpoint_id is None:
        return default
    if not is_step(checkpoint_id):
        raise InvalidRequest(f"checkpoint_id {checkpoint_id!r} is no step", hint='pass a number, as "100"')
    return int(_last(checkpoint_id))


def is_step(checkpoint_id: str | os.PathLike[str]) -> bool:
    return _last(checkpoint_id).isdecimal()


def _last(checkpoint_id: str | os.PathLike[str]) -> str:
    return os.fspath(checkpoint_id).rpartition("/")[2].removeprefix("step-")
