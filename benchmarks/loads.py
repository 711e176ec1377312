"""What loaders are measured with: the same samples for all, written once."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import obstore
from obstore.store import S3Store

from forebay.loaders import Resized

TOKENS = 1024
IMAGE_SIDE = 224
# JPEG -> uint8, (3, side, side): the decoder that all loaders share.
decoded = Resized(IMAGE_SIDE, IMAGE_SIDE)
_SHARDS = 16


@dataclass(frozen=True)
class Load:
    """`sample_bytes` of a sample in a batch; `is_image`: decoded and resized, not copied."""

    name: str
    field: str
    samples: int
    sample_bytes: int
    write: Callable[[Path, random.Random], None]

    @property
    def is_image(self) -> bool:
        return self.field == "jpg"

    @property
    def is_tokens(self) -> bool:
        return self.field == "tokens"


def loads(scale: float) -> list[Load]:
    """100 kB and 4 kB undecoded, windows of 2 kB of token ids, JPEGs; `scale` of the usual numbers."""

    def of(samples: int) -> int:
        return max(1, int(samples * scale / _SHARDS)) * _SHARDS

    large, small, windows, images = of(4096), of(65536), of(65536), of(2048)
    return [
        Load("100 kB undecoded", "bin", large, 100_000, _tars(large, 100_000)),
        Load("4 kB undecoded", "bin", small, 4_000, _tars(small, 4_000)),
        Load("2 kB windows of ids", "tokens", windows, 8 * (TOKENS + 1), _ids(windows)),
        Load("JPEG decoded to 224", "jpg", images, 3 * IMAGE_SIDE**2, _jpegs(images)),
    ]


def members(files: Path) -> Iterator[bytes]:
    """Of all tar files of a folder."""
    for path in sorted(files.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                found = tar.extractfile(member)
                assert found
                yield found.read()


def tar_bytes(members: list[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def upload_tars(store: S3Store, prefix: str, shards: int, samples: int, sample_bytes: int, seed: int) -> int:
    """Noise, field `bin`; the bytes of one shard: all are of one size."""
    noise, shard_bytes = random.Random(seed), 0
    for shard in range(shards):
        names = [f"{shard:03d}-{number:04d}.bin" for number in range(samples)]
        body = tar_bytes([(name, noise.randbytes(sample_bytes)) for name in names])
        obstore.put(store, f"{prefix}/{shard:03d}.tar", body, use_multipart=False)
        shard_bytes = len(body)
    return shard_bytes


def _tars(samples: int, sample_bytes: int) -> Callable[[Path, random.Random], None]:
    def write(folder: Path, noise: random.Random) -> None:
        _write_shards(folder, samples, "bin", lambda: noise.randbytes(sample_bytes))

    return write


def _jpegs(samples: int) -> Callable[[Path, random.Random], None]:
    def write(folder: Path, noise: random.Random) -> None:
        from PIL import Image

        pictures = []
        for _ in range(32):
            rough = np.frombuffer(noise.randbytes(3 * 40 * 30), np.uint8).reshape(30, 40, 3)
            to = io.BytesIO()
            Image.fromarray(rough).resize((500, 375)).save(to, "JPEG", quality=90)
            pictures.append(to.getvalue())
        _write_shards(folder, samples, "jpg", lambda: noise.choice(pictures))

    return write


def _write_shards(folder: Path, samples: int, field: str, sample: Callable[[], bytes]) -> None:
    for shard in range(_SHARDS):
        names = [f"{shard:05d}-{number:06d}.{field}" for number in range(samples // _SHARDS)]
        (folder / f"{shard:05d}.tar").write_bytes(tar_bytes([(name, sample()) for name in names]))


def _ids(windows: int) -> Callable[[Path, random.Random], None]:
    def write(folder: Path, noise: random.Random) -> None:
        for shard in range(_SHARDS):
            ids = windows // _SHARDS * TOKENS + 1
            (folder / f"{shard:05d}.bin").write_bytes(noise.randbytes(2 * ids))

    return write
