"""Images: one decoder gives the pixels of another, for every kind and colour."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from forebay.core.errors import InvalidRequest
from forebay.loaders import Resized, images
from forebay.loaders.images import image


def encoded(mode: str, kind: str, height: int = 90, width: int = 130) -> bytes:
    rows = np.add.outer(np.arange(height), np.arange(width)).astype(np.uint8)
    to = io.BytesIO()
    Image.fromarray(rows).convert(mode).save(to, kind)
    return to.getvalue()


KINDS = [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG"), ("L", "PNG"), ("RGBA", "PNG")]


@pytest.mark.parametrize(("mode", "kind"), KINDS)
def test_pixels_are_those_of_pillow(mode: str, kind: str):
    data = encoded(mode, kind)
    expected = np.array(Image.open(io.BytesIO(data)))
    expected = expected[None] if expected.ndim == 2 else expected.transpose(2, 0, 1)
    assert np.array_equal(image(data).numpy(), expected)
    # Formats hand out memory of the shard.
    assert torch.equal(image(memoryview(data)), image(data))  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "kind"), KINDS)
@pytest.mark.parametrize("turbo", [True, False])
def test_resized_is_of_that_size_and_close_to_pillow(
    mode: str, kind: str, turbo: bool, monkeypatch: pytest.MonkeyPatch
):
    if not turbo:
        monkeypatch.setattr(images, "simplejpeg", None)
    data = encoded(mode, kind)
    found = Resized(30, 40)(data)
    assert found.shape == (3, 30, 40) and found.dtype == torch.uint8 and found.is_contiguous()
    picture: Any = Image.open(io.BytesIO(data)).convert("RGB")
    expected = np.array(picture.resize((40, 30), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.abs(found.numpy().astype(int) - expected).mean() < 4
    assert Resized(90, 130)(data).shape == (3, 90, 130) == Resized(90, 130)(data).shape
    assert Resized(200, 300)(data).shape == (3, 200, 300)


def test_what_is_cut_off_is_an_error_not_a_grey_patch():
    for kind in ("JPEG", "PNG"):
        data = encoded("RGB", kind)
        for decode in (image, Resized(30, 40)):
            with pytest.raises((ValueError, OSError, SyntaxError)):
                decode(data[: len(data) // 2])
    with pytest.raises(InvalidRequest, match="0 x 5"):
        Resized(0, 5)
