"""The data: 1,797 real handwritten digits that scikit-learn ships, as WebDataset shards.

E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (8 x 8 pixels, 0 to 16).
"""

from __future__ import annotations

import io
import random
import tarfile

import numpy as np
import obstore
import torch
from obstore.store import S3Store
from PIL import Image
from sklearn.datasets import load_digits

SHARDS = 24
TEST_EVERY = 6


def upload_shards(store: S3Store, prefix: str, seed: int) -> int:
    """The training part in shards of uneven size; returns bytes."""
    images, labels = _split(test=False)
    cuts = sorted(random.Random(seed).sample(range(20, len(images) - 20), SHARDS - 1))
    size_bytes = 0
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(images)], strict=True)):
        data = _shard(images, labels, start, end)
        obstore.put(store, f"{prefix}/digits-{number:03d}.tar", data, use_multipart=False)
        size_bytes += len(data)
    return size_bytes


def test_split() -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 images (n, 1, 8, 8), labels (n,)): every sixth image, seen by no training step."""
    images, labels = _split(test=True)
    return torch.from_numpy(images)[:, None], torch.from_numpy(labels)


def _split(*, test: bool) -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    chosen = (np.arange(len(digits.target)) % TEST_EVERY == 0) == test
    # 0 to 16 becomes 0 to 255, so that the PNGs look like digits to a person.
    pixels = np.minimum(digits.images[chosen] * 16, 255).astype(np.uint8)
    return pixels, digits.target[chosen].astype(np.int64)


def _shard(images: np.ndarray, labels: np.ndarray, start: int, end: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in range(start, end):
            picture = io.BytesIO()
            Image.fromarray(images[sample]).save(picture, "PNG")
            _add(tar, f"{sample:05d}.png", picture.getvalue())
            _add(tar, f"{sample:05d}.cls", str(labels[sample]).encode())
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
