"""Memory that is used again, and never while somebody looks at it."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import InvalidRequest
from forebay.loaders.pool import BatchPool

MIB = 1 << 20


@given(
    st.lists(st.tuples(st.integers(1, 400), st.sampled_from([0, 1, 2, 3]), st.booleans()), max_size=40),
    st.integers(0, 4),
)
def test_what_is_held_is_never_written_to_by_another(steps, kept_mib):
    """Tensors, views of them and arrays over them, held or dropped in any order."""
    pool = BatchPool(kept_mib * MIB)
    held: list[tuple[torch.Tensor, int]] = []
    for number, (rows, kind, keeps) in enumerate(steps):
        mark = number % 251
        whole = pool.empty((rows, 1000), torch.uint8).fill_(mark)
        looked_at = [whole, whole[rows // 2 :], whole.view(-1), torch.from_numpy(whole.numpy())][kind]
        if keeps:
            held.append((looked_at, mark))
        elif held:
            held.pop(0)
        del whole, looked_at
        assert all(bool((tensor == mark).all()) for tensor, mark in held)


def test_memory_comes_back_and_no_more_is_kept_than_allowed():
    pool = BatchPool(MIB)
    first = pool.empty((MIB,), torch.uint8)
    place = first.data_ptr()
    second = pool.empty((MIB,), torch.uint8)
    assert second.data_ptr() != place
    view = first[10:20]
    del first
    third = pool.empty((MIB,), torch.uint8)
    assert third.data_ptr() != place
    del view
    gc.collect()
    assert pool.empty((MIB // 8,), torch.int64).data_ptr() == place
    assert pool._kept_bytes == 0
    del second
    big = [pool.empty((MIB,), torch.uint8) for _ in range(4)]
    del big
    gc.collect()
    pool.empty((MIB,), torch.uint8)
    assert pool._kept_bytes <= MIB


@pytest.mark.parametrize("shape", [(0,), (3, 0), (5,), (70_000,), (2, 3, 40_000)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.bool])
def test_shapes_and_types(shape: tuple[int, ...], dtype: torch.dtype):
    found = BatchPool(MIB).empty(shape, dtype)
    assert found.shape == shape and found.dtype == dtype and found.is_contiguous()
    values = [torch.arange(70_000), torch.arange(70_000) + 1]
    assert torch.equal(BatchPool(MIB).stack(values), torch.stack(values))


def test_page_locked_memory_without_a_device_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(InvalidRequest, match="no CUDA device"):
        BatchPool(MIB, pin=True)
    assert BatchPool(MIB, pin=None).empty((MIB,), torch.uint8).is_pinned() is False
