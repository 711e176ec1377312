"""ETags of files: the MD5 of S3, whole and in parts, with the SIMD extension and without."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.tiers import md5


def expected(data: bytes, part_bytes: int) -> str:
    if len(data) <= part_bytes:
        return hashlib.md5(data).hexdigest()
    parts = [data[start : start + part_bytes] for start in range(0, len(data), part_bytes)]
    return f"{hashlib.md5(b''.join(hashlib.md5(p).digest() for p in parts)).hexdigest()}-{len(parts)}"


@pytest.mark.parametrize("simd", [True, False])
def test_any_length_in_any_parts(tmp_path: Path, simd: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(md5, "_STEP_BYTES", 192)
    if not simd:
        monkeypatch.setattr(md5, "md5_many", None)
    path = tmp_path / "file"

    @settings(max_examples=200)
    @given(st.binary(max_size=9000), st.integers(1, 3000))
    def check(data: bytes, part_bytes: int) -> None:
        path.write_bytes(data)
        assert md5.object_etag(path, part_bytes) == expected(data, part_bytes)

    check()
