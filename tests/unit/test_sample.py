"""A sample of a snapshot does not depend on how it comes, nor on what is no tensor."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given

from forebay.checkpointd.container import lay_out
from forebay.checkpointd.sample import Sample

TENSORS = {"a": torch.arange(7_000_000, dtype=torch.float32), "b": torch.zeros(3), "c": torch.zeros(0)}


def file_of(tensors: dict[str, torch.Tensor], note: str) -> memoryview:
    container = lay_out(tensors, {"note": note})
    file = torch.zeros(container.size_bytes, dtype=torch.uint8)
    container.fill(file, container.places(file), tensors)
    return memoryview(file.numpy())


def sample(file: memoryview, cuts: list[int] = []) -> str | None:  # noqa: B006
    found = Sample(len(file))
    for start, end in zip([0, *cuts], [*cuts, len(file)], strict=True):
        found.update(file[start:end])
    return found.xxh3


@given(st.lists(st.integers(64, 28_000_000), unique=True, max_size=5).map(sorted))
def test_cut_anyhow(cuts: list[int]):
    assert sample(file_of(TENSORS, ""), cuts) == sample(file_of(TENSORS, ""))


def test_of_the_tensors_alone():
    assert sample(file_of(TENSORS, "one")) == sample(file_of(TENSORS, "another and longer" * 100))
    assert sample(file_of(TENSORS, "")) != sample(file_of(TENSORS | {"a": TENSORS["a"] * 2}, ""))
    assert sample(file_of({"c": torch.zeros(0)}, "")) is None


def test_small_ones_whole():
    one = {"a": torch.zeros(4_000_000, dtype=torch.uint8)}
    for place in (0, 1_234_567, 3_999_999):
        other = {"a": one["a"].clone()}
        other["a"][place] = 1
        assert sample(file_of(one, "")) != sample(file_of(other, ""))
