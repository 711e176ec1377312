"""States as tensors and JSON; arenas that tell whole from half-written."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.checkpointd import arena
from forebay.checkpointd.arena import DATA_OFFSET, Arena, read_header
from forebay.checkpointd.container import OpenContainer, lay_out
from forebay.checkpointd.state import Flattened, unflatten
from forebay.core.errors import CheckpointCorrupt, CheckpointError, UnsupportedValue

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
)
keys = st.text(max_size=4) | st.integers() | st.booleans()
states = st.recursive(
    scalars | st.builds(lambda n: torch.arange(n, dtype=torch.float32), st.integers(0, 5)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def through_a_file(state: Any) -> Any:
    import json

    flat = Flattened(state)
    container = lay_out(flat.tensors, {"forebay": json.dumps(flat.skeleton)})
    into = torch.zeros(container.size_bytes, dtype=torch.uint8)
    container.fill(into, container.places(into), flat.tensors)
    with tempfile.TemporaryFile() as file:
        file.write(into.numpy().tobytes())
        file.flush()
        found = OpenContainer(file.fileno(), "test")
        return unflatten(found.skeleton(), {name: found.tensor(name) for name in found.names})


@settings(max_examples=60)
@given(states)
def test_what_goes_in_comes_out(state):
    assert same(through_a_file(state), state)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
     torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64],
)  # fmt: skip
def test_every_dtype_bit_for_bit(dtype: torch.dtype):
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    found = through_a_file({"t": tensor, "odd": torch.ones(3, dtype=torch.uint8)})["t"]
    assert found.dtype == dtype and found.shape == tensor.shape
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_odd_tensors():
    base = torch.arange(12.0).reshape(3, 4)
    state = {"view": base.t(), "strided": base[:, ::2], "scalar": torch.tensor(7), "empty": torch.empty(0, 3)}
    found = through_a_file(state)
    assert all(torch.equal(found[k], state[k]) for k in state)


def test_numpy_and_optimizer_states():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"opt": optimizer.state_dict(), "np": np.arange(4.0), "n": np.float32(2), "od": OrderedDict(a=1)}
    found = through_a_file(state)
    optimizer.load_state_dict(found["opt"])
    assert isinstance(found["np"], np.ndarray) and found["n"] == 2.0 and found["od"] == {"a": 1}


def test_a_hundred_thousand_tiny_tensors():
    state = {"many": [torch.full((2,), number) for number in range(100_000)]}
    found = through_a_file(state)
    assert torch.equal(torch.stack(found["many"]), torch.stack(state["many"]))


def test_ten_levels_and_keys_that_are_no_strings():
    state: Any = torch.ones(3)
    for level in range(10):
        state = {level: [state, {level % 2 == 0: torch.tensor(level)}], None: (level, 1.5)}
    assert same(through_a_file(state), state)


def test_tensors_that_share_storage_keep_their_values():
    base = torch.arange(10.0)
    state = {"all": base, "tied": base, "half": base[:5], "back": base.flip(0), "wide": base[:1].expand(4, 3)}
    found = through_a_file(state)
    assert all(torch.equal(found[k], state[k]) for k in state)


def test_names_that_collide_stay_apart():
    one, two = torch.ones(1), torch.zeros(1)
    found = through_a_file({"a": {"b": one}, "a.b": two})
    assert torch.equal(found["a"]["b"], one) and torch.equal(found["a.b"], two)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), r"state\['x'\]\[1\] is a object"),
        ({1, 2}, "is a set"),
        (lambda: 0, "is a function"),
        (torch.empty(2, device="meta"), "meta tensor"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "only dense"),
        ({(1, 2): 3}, "key of type tuple"),
        (torch.zeros(1, dtype=torch.complex128), "complex128"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, says: str):
    """C8: nothing is pickled; and nothing is left out in silence."""
    with pytest.raises(UnsupportedValue, match=says):
        through_a_file({"x": [0, value]})


def test_a_skeleton_that_refers_to_nothing():
    with pytest.raises(CheckpointCorrupt):
        unflatten({"D": [["a", {"T": "gone"}]]}, {})


def test_stock_safetensors_reads_it(tmp_path):
    tensors = {"w": torch.randn(4, 3), "b": torch.randn(3).bfloat16(), "i": torch.arange(3, dtype=torch.int8)}
    container = lay_out(tensors, {})
    into = torch.zeros(container.size_bytes, dtype=torch.uint8)
    container.fill(into, container.places(into), tensors)
    (tmp_path / "f.safetensors").write_bytes(into.numpy().tobytes())
    found = safetensors.torch.load_file(tmp_path / "f.safetensors")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_an_arena_is_whole_only_after_finish():
    found = Arena(4096)
    found.begin("attempt-1", 100)
    with pytest.raises(CheckpointCorrupt, match="half written"):
        read_header(found.fd)
    generation = found.finish("attempt-1", 100)
    header = read_header(found.fd)
    assert (header.generation, header.size_bytes, header.attempt) == (generation, 100, "attempt-1")
    found.begin("attempt-2", 100)
    with pytest.raises(CheckpointCorrupt):
        read_header(found.fd)
    assert found.finish("attempt-2", 100) == generation + 2


def test_an_arena_cannot_shrink_under_its_reader():
    """F37: a truncated map is SIGBUS."""
    found = Arena(1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(found.fd, 10)


def test_what_is_no_arena_is_refused():
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, DATA_OFFSET * 2)
    with pytest.raises(CheckpointCorrupt, match="not an arena"):
        read_header(fd)
    os.pwrite(fd, arena._HEADER.pack(b"FOREBAY1", 2, 1 << 40, b"a"), 0)
    with pytest.raises(CheckpointCorrupt):
        read_header(fd)
    os.pwrite(fd, arena._HEADER.pack(b"FOREBAY1", 2, 10, b"a"), 0)
    with pytest.raises(CheckpointCorrupt, match="sealed"):
        read_header(fd)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 2)
    assert read_header(fd).attempt == "a"
    os.close(fd)


def test_more_memory_than_there_is_is_said_first():
    """F12."""
    with pytest.raises(CheckpointError, match=r"need .*PiB of host memory, there is"):
        Arena(1 << 50)
