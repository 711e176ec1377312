"""Which shards of a dataset a job, a pin or an eviction is about."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from forebay.core.errors import InvalidRequest, NotFound
from forebay.core.protocol import Selection
from forebay.stager.manifest import Manifest

_WHOLE = Selection()


def select(manifest: Manifest, selection: Selection) -> npt.NDArray[np.int64]:
    """Shard numbers in order. Raises NotFound for a key that is not there, or when nothing is left."""
    numbers = np.arange(len(manifest))
    if selection == _WHOLE:
        return numbers
    if selection.keys is not None:
        numbers = np.array([_number(manifest, key) for key in selection.keys], dtype=np.int64)
    if selection.glob is not None:
        keep = [fnmatchcase(key, selection.glob) for key in manifest.keys(numbers)]
        numbers = numbers[np.array(keep, dtype=bool)]
    if selection.sample is not None:
        if not 0 < selection.sample <= 1:
            raise InvalidRequest(f"sample is {selection.sample}", hint="a share between 0 and 1")
        count = max(1, round(len(numbers) * selection.sample))
        numbers = np.random.default_rng(0).permutation(numbers)[:count]
    if not len(numbers):
        raise NotFound(f"the selection leaves no shard of {manifest.url}")
    return np.unique(numbers)


def _number(manifest: Manifest, key: str) -> int:
    number = manifest.find(key)
    if number is None:
        raise NotFound(f"{manifest.url} has no shard {key!r}")
    return number
