"""Images from bytes. JPEG by libjpeg-turbo where simplejpeg is installed, the rest by Pillow.

Measured here on 500 x 375 JPEGs: simplejpeg decodes 1.4 times as fast as Pillow, and 2 times as fast to 224,
as it can leave out detail in eighths (https://libjpeg-turbo.org) where Pillow can in halves.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate

from forebay.core.errors import InvalidRequest

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

_JPEG = b"\xff\xd8\xff"
_COLOURS = ("Gray", "YCbCr", "RGB")


def pil(data: bytes) -> Any:
    from PIL import Image

    picture = Image.open(io.BytesIO(data))
    picture.load()
    return picture


def image(data: bytes) -> torch.Tensor:
    """uint8, (channels, height, width); grey images have one channel."""
    if _by_turbo(data):
        header = simplejpeg.decode_jpeg_header(data)
        return _channels_first(simplejpeg.decode_jpeg(data, "GRAY" if header[2] == "Gray" else "RGB"))
    return _channels_first(np.array(pil(data)))


@dataclass(frozen=True)
class Resized:
    """A decoder: uint8, (3, height, width), whatever the image's size, colours or kind.

    Aspect is not kept. Reduced while it is decoded as far as that goes, then with antialiasing.
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise InvalidRequest(f"an image cannot be resized to {self.height} x {self.width}")

    def __call__(self, data: bytes) -> torch.Tensor:
        pixels = _channels_first(self._decoded(data))
        if pixels.shape[1:] == (self.height, self.width):
            return pixels
        size = (self.height, self.width)
        return interpolate(pixels[None], size, mode="bilinear", antialias=True)[0].contiguous()

    def _decoded(self, data: bytes) -> npt.NDArray[np.uint8]:
        if _by_turbo(data):
            found: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
                data, "RGB", min_height=self.height, min_width=self.width
            )
            return found
        from PIL import Image

        picture = Image.open(io.BytesIO(data))
        picture.draft("RGB", (self.width, self.height))
        return np.array(picture.convert("RGB"))


def _by_turbo(data: bytes) -> bool:
    """Other colours (CMYK, YCCK) are Pillow's."""
    if simplejpeg is None or bytes(data[:3]) != _JPEG:
        return False
    return bool(simplejpeg.decode_jpeg_header(data)[2] in _COLOURS)


def _channels_first(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    """A view: who makes a batch of it copies anyway."""
    if pixels.ndim == 2:
        return torch.from_numpy(pixels[None])
    return torch.from_numpy(pixels).permute(2, 0, 1)
