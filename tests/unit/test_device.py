"""Batches on a device: the same ones, in order, none lost; copies to a GPU cannot be tried here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from forebay.loaders import DevicePrefetcher

BATCHES = [(torch.full((2,), float(n)), [f"key-{n}"], {"x": torch.tensor(n)}) for n in range(5)]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_on_the_cpu_they_are_handed_through(count: int):
    feed = DevicePrefetcher(BATCHES[:count], "cpu")
    assert len(feed) == count and all(a is b for a, b in zip(feed, BATCHES, strict=False))
    assert len(list(feed)) == count


@pytest.mark.parametrize("count", [0, 1, 5])
def test_on_another_device_tensors_are_moved_and_the_rest_stays(count: int):
    """`meta` has no data, but is another device."""
    found = list(DevicePrefetcher(BATCHES[:count], "meta"))
    assert len(found) == count
    for (tensor, names, more), (_, expected, _) in zip(found, BATCHES, strict=False):
        assert tensor.device.type == more["x"].device.type == "meta" and names == expected


class Counted:
    """A loader whose state is how many batches it has yielded."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 5:
            self.at += 1
            yield torch.tensor(self.at)
        self.at = 0

    def state_dict(self) -> int:
        return self.at

    def load_state_dict(self, state: int) -> None:
        self.at = state


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_its_state_is_that_of_the_batch_yielded_not_of_the_one_ahead(device: str):
    feed = DevicePrefetcher(Counted(), device)
    assert feed.state_dict() == 0
    states = [feed.state_dict() for _ in feed]
    assert states == [1, 2, 3, 4, 5] and feed.state_dict() == 0
    feed.load_state_dict(3)
    assert feed.state_dict() == 3 and len(list(feed)) == 2
