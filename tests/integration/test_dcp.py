"""torch.distributed.checkpoint through Forebay, on real ranks: sharded, replicated, cached, asynchronous."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from forebay.benchmarks.seaweed import S3Server, free_ports
from forebay.checkpointd import Checkpointer, ForebayReader
from tests.conftest import Node

# Ranks that share two cores with other tests are no ranks.
pytestmark = pytest.mark.alone

# A DeviceMesh keeps gloo's threads beyond destroy_process_group, and they may touch Python objects while the
# interpreter ends, which aborts it (torch 2.13): what runs at exit runs, and then there is no more to end.
END = """
import atexit
dist.barrier()
dist.destroy_process_group()
atexit._run_exitfuncs()
sys.stderr.flush()
os._exit(0)
"""

RANKED = """
import os, sys
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forebay.checkpointd import ForebayReader, ForebayWriter
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
upstream = sys.argv[2]
"""

SHARDED = (
    """
import os, sys
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from forebay.checkpointd import ForebayReader, ForebayWriter
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
whole = torch.arange(70.0).reshape(10, 7)
def state(fill):
    data = whole if fill else torch.zeros(10, 7)
    return {"a": distribute_tensor(data.clone(), mesh, [Shard(0)]),
            "b": distribute_tensor(data.clone(), mesh, [Shard(1)]),
            "c": torch.full((3,), 5.0) if fill else torch.zeros(3), "x": 7 if fill else 0}
if sys.argv[1] == "save":
    writer = ForebayWriter("sharded", upstream=sys.argv[2])
    dcp.save(state(True), storage_writer=writer, checkpoint_id="3")
    writer.wait()
else:
    found = state(False)
    dcp.load(found, storage_reader=ForebayReader("sharded", upstream=sys.argv[2]))
    assert torch.equal(found["a"].full_tensor(), whole) and torch.equal(found["b"].full_tensor(), whole)
    assert found["c"].tolist() == [5.0] * 3 and found["x"] == 7
"""
    + END
)


def torchrun(ranks: int, script: str, *args: str) -> str:
    """What the ranks said on stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += [
        "--master-addr=127.0.0.1",
        f"--master-port={free_ports(1)[0]}",
        "--monitor-interval=0.1",
        script,
    ]
    run = subprocess.run([*command, *args], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr[-9000:]
    return run.stderr


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2)])
def test_dcp_reshards(daemon: Node, upstream: str, tmp_path: Path, saved_by: int, loaded_by: int):
    """F41: real ranks, DTensors on two axes, another world size."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    torchrun(saved_by, str(script), "save", upstream)
    torchrun(loaded_by, str(script), "load", upstream)


FSDP = (
    RANKED
    + """
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (size,))
def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)
def train(model, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(1000 + step)
        model(torch.randn(8, 6)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
def told(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    whole = {n: t.full_tensor() for n, t in model_state.items()}
    moments = {n: s["exp_avg"].full_tensor() for n, s in optimizer_state["state"].items()}
    return whole, moments
if sys.argv[1] == "save":
    model, optimizer = build(0)
    train(model, optimizer, 3)
    writer = ForebayWriter("fsdp", upstream=upstream)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    pending = dcp.async_save(
        {"model": model_state, "optimizer": optimizer_state}, storage_writer=writer, checkpoint_id="3"
    )
    pending.result()
    # Trained on meanwhile: what is saved is what async_save saw.
    reference = told(model, optimizer)
    train(model, optimizer, 2)
    writer.wait()
    if rank == 0:
        torch.save(reference, sys.argv[3])
else:
    model, optimizer = build(1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, storage_reader=ForebayReader("fsdp", upstream=upstream))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    for mine, reference in zip(told(model, optimizer), torch.load(sys.argv[3])):
        assert mine.keys() == reference.keys()
        for name, tensor in reference.items():
            assert torch.equal(mine[name], tensor), name
"""
    + END
)

REPLICATED = (
    RANKED
    + """
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
torch.manual_seed(0)
layers = [torch.nn.Linear(50, 50) for _ in range(6)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
writer = ForebayWriter("ddp", upstream=upstream)
planner = DefaultSavePlanner(enable_plan_caching=True)
state = {"model": model.module.state_dict()}
for step in (1, 2, 3):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(step))
    if step == 3:
        state["more"] = torch.full((5,), 3.0)
    dcp.save(state, storage_writer=writer, planner=planner, checkpoint_id=str(step))
    writer.wait()
for step in (1, 2, 3):
    found = {"model": {name: torch.zeros_like(t) for name, t in model.module.state_dict().items()}}
    dcp.load(found, storage_reader=ForebayReader("ddp", upstream=upstream), checkpoint_id=str(step))
    assert {float(t.unique()) for t in found["model"].values()} == {float(step)}
"""
    + END
)


# Each rank is a node: argv[3] and argv[4] are their homes.
NODES = (
    """
import os, sys
os.environ["FOREBAY_HOME"] = sys.argv[3 + int(os.environ["RANK"])]
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from forebay.checkpointd import ForebayReader, ForebayWriter
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
def state(value):
    one = {f"r{n}": torch.full((500,), float(value)) for n in range(4)} if sys.argv[5] == "replicated" else {}
    return {"s": distribute_tensor(torch.full((8, 50), float(value)), mesh, [Shard(0)]), "n": value} | one
reader = ForebayReader("run", upstream=sys.argv[2])
def load():
    found = state(0)
    dcp.load(found, storage_reader=reader)
    tensors = [getattr(t, "to_local", lambda: t)() for name, t in found.items() if name != "n"]
    values = {float(value) for tensor in tensors for value in tensor.unique()}
    assert values == {float(found["n"])}, found
    everybody = [None, None]
    dist.all_gather_object(everybody, found["n"])
    assert len(set(everybody)) == 1, everybody
    return everybody[0]
if sys.argv[1] == "save":
    writer = ForebayWriter("run", upstream=sys.argv[2])
    for step in (1, 2):
        dcp.save(state(step), storage_writer=writer, checkpoint_id=str(step))
        writer.wait()
elif sys.argv[1] == "again":
    try:
        load()
        raise SystemExit("the damage went unseen")
    except dcp.api.CheckpointException as err:
        assert "rank-00000.safetensors is damaged" in str(err), err
    assert load() == 1
else:
    assert load() == int(sys.argv[1])
"""
    + END
)


@pytest.fixture
def daemon(node: Node, s3: S3Server) -> Iterator[Node]:
    node.start("checkpoint")
    yield node


@pytest.fixture
def upstream(tmp_path: Path) -> str:
    return str(tmp_path / "up")


def run_on(ranks: int, tmp_path: Path, code: str, *args: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    torchrun(ranks, str(script), *args)


@pytest.mark.parametrize("loaded_by", [1, 3])
def test_fsdp2_saved_asynchronously_loads_on_any_number_of_ranks(
    daemon: Node, upstream: str, tmp_path: Path, loaded_by: int
):
    """F41: model and optimizer, sharded by fully_shard; ten rows do not divide by three."""
    run_on(2, tmp_path, FSDP, "save", upstream, str(tmp_path / "reference"))
    run_on(loaded_by, tmp_path, FSDP, "load", upstream, str(tmp_path / "reference"))


def test_replicated_tensors_are_saved_once_and_spread_and_plans_are_cached(
    daemon: Node, upstream: str, tmp_path: Path
):
    """Each save is an attempt of its own (C3), although torch hands out the first one's plan again."""
    run_on(2, tmp_path, REPLICATED, "save", upstream)
    for step in (1, 2, 3):
        (commit,) = Path(upstream).glob(f"ddp/step-{step:09d}/*/COMMIT.json")
        names: list[str] = []
        for file in commit.parent.glob("rank-*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                assert opened.keys()
                names += opened.keys()
        assert len(names) == len(set(names)) == 12 + (step == 3)


@pytest.fixture
def two_nodes(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Their homes."""
    node.start("checkpoint")
    homes = [os.environ["FOREBAY_HOME"]]
    other = Node(node.home / "o", monkeypatch)
    other.home.mkdir()
    other.start("checkpoint")
    yield [*homes, os.environ["FOREBAY_HOME"]]
    other.close()
    other.tell()


def files_on(home: str) -> set[str]:
    return {path.name for path in Path(home).rglob("step-000000002/*/rank-*.safetensors")}


def test_a_node_brings_what_its_ranks_need_and_no_more(two_nodes: list[str], upstream: str, tmp_path: Path):
    """On a new pair of nodes: every file is verified by one rank, and not fetched by all."""
    run_on(2, tmp_path, NODES, "save", upstream, *two_nodes, "sharded")
    for home in two_nodes:
        for folder in Path(home).rglob("step-*"):
            shutil.rmtree(folder)
    run_on(2, tmp_path, NODES, "2", upstream, *two_nodes, "sharded")
    assert [files_on(home) for home in two_nodes] == [{"rank-00000.safetensors"}, {"rank-00001.safetensors"}]


def damage(home: str, name: str) -> None:
    for path in Path(home).rglob(f"step-000000002/*/{name}"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def test_all_ranks_fall_back_to_the_same_older_checkpoint(
    two_nodes: list[str], upstream: str, tmp_path: Path
):
    """C4: only the second node can see that its file is damaged everywhere."""
    run_on(2, tmp_path, NODES, "save", upstream, *two_nodes, "sharded")
    for place in (two_nodes[1], upstream):
        damage(place, "rank-00001.safetensors")
    run_on(2, tmp_path, NODES, "1", upstream, *two_nodes, "sharded")


def test_damage_that_is_seen_late_is_an_error_and_the_next_load_falls_back(
    two_nodes: list[str], upstream: str, tmp_path: Path
):
    """The first node's copy is right; the second needs it as well, and finds it damaged upstream."""
    run_on(2, tmp_path, NODES, "save", upstream, *two_nodes, "replicated")
    damage(upstream, "rank-00000.safetensors")
    run_on(2, tmp_path, NODES, "again", upstream, *two_nodes, "replicated")


def test_what_another_api_saved_is_refused_by_name(daemon: Node, upstream: str):
    with Checkpointer("plain", upstream=upstream) as checkpoints:
        checkpoints.save(1, {"w": torch.zeros(3)}).wait()
    with pytest.raises(dcp.api.CheckpointException, match="restore it with Checkpointer"):
        dcp.load({"w": torch.ones(3)}, storage_reader=ForebayReader("plain", upstream=upstream))
