"""State dicts as tensors and a skeleton of plain JSON: nothing is ever pickled (C8).

The skeleton marks what JSON cannot say: {"T": name} a tensor, {"N": name} a NumPy array,
{"D": [[key, value], ...]} a dict, {"L": [...]} a list, {"U": [...]} a tuple, {"B": base64} bytes,
{"F": "nan"} a float that is no number.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from forebay.core.errors import CheckpointCorrupt, UnsupportedValue

Json: TypeAlias = Any
_DEEPEST = 200


class Flattened:
    """`tensors` by name, in order of the state; `skeleton` puts them back."""

    def __init__(self, state: Any) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.skeleton: Json = self._encode(state, ())

    def _encode(self, value: Any, path: tuple[Any, ...]) -> Json:
        if len(path) > _DEEPEST:
            raise UnsupportedValue(f"{_spell(path[:5])}... is nested deeper than {_DEEPEST} levels")
        if isinstance(value, torch.Tensor):
            return {"T": self._keep(value, path)}
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"F": repr(value)}
        if isinstance(value, np.ndarray) and value.dtype.hasobject is False:
            return {"N": self._keep(torch.from_numpy(np.ascontiguousarray(value)), path)}
        if isinstance(value, np.generic):
            return self._encode(value.item(), path)
        if isinstance(value, bytes):
            return {"B": base64.b64encode(value).decode()}
        if isinstance(value, Mapping):
            return {"D": [[self._key(k, path), self._encode(v, (*path, k))] for k, v in value.items()]}
        if isinstance(value, list | tuple):
            items = [self._encode(item, (*path, number)) for number, item in enumerate(value)]
            return {"U" if isinstance(value, tuple) else "L": items}
        raise UnsupportedValue(
            f"{_spell(path)} is a {type(value).__name__}, which cannot be saved",
            hint="keep tensors, arrays, numbers, strings, bytes, and dicts, lists and tuples of these",
        )

    def _key(self, key: Any, path: tuple[Any, ...]) -> Json:
        if isinstance(key, str | int | float | bool | None):
            return key
        raise UnsupportedValue(f"{_spell(path)} has a key of type {type(key).__name__}")

    def _keep(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        if tensor.is_meta:
            raise UnsupportedValue(f"{_spell(path)} is a meta tensor: it has no values to save")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise UnsupportedValue(f"{_spell(path)} is a {tensor.layout} tensor; only dense ones are saved")
        name = base = ".".join(str(part) for part in path) or "value"
        number = 1
        while name in self.tensors:
            number += 1
            name = f"{base}#{number}"
        self.tensors[name] = tensor.detach()
        return name


def unflatten(skeleton: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state again. Raises CheckpointCorrupt when a tensor is not there."""
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, value),) = skeleton.items()
    if kind == "D":
        return {key: unflatten(item, tensors) for key, item in value}
    if kind in ("L", "U"):
        items = [unflatten(item, tensors) for item in value]
        return tuple(items) if kind == "U" else items
    if kind == "F":
        return float(value)
    if kind == "B":
        return base64.b64decode(value)
    if kind not in ("T", "N") or value not in tensors:
        raise CheckpointCorrupt(f"the state refers to {kind} {value!r}, which the file does not hold")
    return tensors[value] if kind == "T" else tensors[value].cpu().numpy()


def _spell(path: tuple[Any, ...]) -> str:
    return "state" + "".join(f"[{part!r}]" for part in path)
