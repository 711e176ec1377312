"""From bytes to values."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from forebay.core.errors import FormatError, InvalidRequest
from forebay.loaders.images import image, pil

# Of bytes, or of the value itself where the format has values.
Decoder: TypeAlias = Callable[[Any], Any]
Decode: TypeAlias = str | Decoder | Mapping[str, str | Decoder] | None

_IMAGES = ("png", "jpg", "jpeg", "webp", "bmp", "ppm", "pgm")


def array(data: Any) -> torch.Tensor:
    """The bytes themselves as uint8, (size,); samples of one size become one (batch, size) tensor."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if len(data)
        else torch.empty(0, dtype=torch.uint8)
    )


def npy(data: bytes) -> torch.Tensor:
    """A .npy file; never one that would have to be unpickled."""
    return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))


def as_it_is(value: Any) -> Any:
    """Nothing is decoded."""
    return value


_DECODERS: dict[str, Decoder] = {
    "bytes": bytes,
    "array": array,
    "text": bytes.decode,
    "int": int,
    "json": json.loads,
    "npy": npy,
    "pil": pil,
    "image": image,
}
_BY_EXTENSION: dict[str, Decoder] = {
    **dict.fromkeys(_IMAGES, image),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    "npy": npy,
}


def open_decoder(decode: Decode, field: str) -> Decoder:
    """The decoder of one field: by name, by extension (`auto`), or the caller's own.

    Raises InvalidRequest for a name that is not known.
    """
    chosen = decode.get(field) if isinstance(decode, Mapping) else decode
    if chosen is None:
        return as_it_is
    if callable(chosen):
        return chosen
    if chosen == "auto":
        extension = field.split(";")[0].rpartition(".")[2]
        return _BY_EXTENSION.get(extension, as_it_is)
    if chosen not in _DECODERS:
        names = ", ".join(["auto", *_DECODERS])
        raise InvalidRequest(
            f"unknown decoder {chosen!r} for {field!r}", hint=f"one of {names}, or a function"
        )
    return _DECODERS[chosen]


def decode_field(decoder: Decoder, value: Any, field: str, key: str, shard: str) -> Any:
    """Whatever a decoder raises becomes one error that names sample and shard."""
    try:
        return decoder(value)
    except Exception as err:
        raise FormatError(
            f"field {field!r} of sample {key!r} in {shard} cannot be decoded: {type(err).__name__}: {err}"
        ) from err
