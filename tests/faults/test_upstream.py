"""C3 to C7, C9: what upstreams do to uploads, damage to each file in turn, retention beside restores."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forebay.benchmarks.seaweed import S3Server
from forebay.checkpointd import Checkpointer, Keep
from forebay.core.errors import NoCheckpoint, SaveFailed
from tests.conftest import Node
from tests.faults.proxy import Proxy, faulty_proxy
from tests.faults.test_checkpoint_steps import value_of


@pytest.fixture
def proxy(s3: S3Server, node: Node) -> Iterator[Proxy]:
    with faulty_proxy(s3.endpoint) as found:
        node.set(
            AWS_ENDPOINT_URL=found.endpoint,
            FOREBAY_CHECKPOINT__PART_BYTES="5MiB",
            FOREBAY_TRANSFER__ATTEMPT_TIMEOUT_S="2",
        )
        yield found


def state(value: int) -> dict[str, torch.Tensor]:
    """12 MB: three parts."""
    return {"w": torch.full((3_000_000,), float(value)), "b": torch.full((3,), value)}


def forget_the_node(node: Node, trainer: Checkpointer) -> None:
    """Neither memory nor spool are of help."""
    trainer.close()
    # Stopped meanwhile: retention may still be at work there.
    node.stop("checkpoint")
    shutil.rmtree(node.settings.spool_dir / "runs")
    node.start("checkpoint")


@pytest.mark.parametrize("method", ["PUT", "POST", "HEAD"])
@pytest.mark.parametrize("fault", ["500", "503", "reset", "short", "stall", "swallow", "lie"])
def test_an_upload_gets_over_it(proxy: Proxy, node: Node, s3: S3Server, prefix: str, method: str, fault: str):
    """Refusals, broken answers, parts that were taken and lost, lengths that are not true."""
    if fault == "swallow" and method != "PUT":
        pytest.skip("only bytes can be swallowed")
    node.start("checkpoint")
    trainer = Checkpointer("run", upstream=s3.url(f"{prefix}/ckpt"))
    proxy.method, proxy.faults = method, [fault] * 2
    assert trainer.save(1, state(1)).wait(timeout_s=120).level == "committed"
    assert not proxy.faults or method == "POST"
    forget_the_node(node, trainer)
    assert value_of(trainer.restore()[1]) == 1


def test_an_upstream_that_is_gone_for_a_while_delays_the_commit_and_nothing_else(
    proxy: Proxy, node: Node, s3: S3Server, prefix: str
):
    """F36: saves go on into the spool; all of them are committed when it is back."""
    node.start("checkpoint")
    trainer = Checkpointer("run", upstream=s3.url(f"{prefix}/ckpt"))
    proxy.method, proxy.always = "PUT", "reset"
    handles = []
    for step in (1, 2, 3):
        handles.append(trainer.save(step, state(step)))
        handles[-1].wait("local")
    assert trainer.latest() is None
    proxy.always = None
    for handle in handles:
        assert handle.wait(timeout_s=120).level == "committed"
    forget_the_node(node, trainer)
    assert value_of(trainer.restore()[1]) == 3


def test_a_rank_that_never_comes_is_named(node: Node, tmp_path: Path):
    """F34: within a time limit, on every rank that did come; the next attempt is not harmed."""
    node.set(FOREBAY_CHECKPOINT__UPLOAD_TIMEOUT_S="2")
    node.start("checkpoint")
    upstream = str(tmp_path / "up")
    rank = Checkpointer("run", upstream=upstream, rank=0, world_size=3, session="one")
    other = Checkpointer("run", upstream=upstream, rank=2, world_size=3, session="one")
    handles = [rank.save(1, state(1)), other.save(1, state(1))]
    for handle in handles:
        with pytest.raises(SaveFailed, match=r"rank\(s\) \[1\] never became durable"):
            handle.wait()
    assert rank.latest() is None
    three = [
        Checkpointer("run", upstream=upstream, rank=number, world_size=3, session="two")
        for number in range(3)
    ]
    for handle in [at.save(1, state(number)) for number, at in enumerate(three)]:
        handle.wait()
    assert [value_of(three[0].restore(rank=number)[1]) for number in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("where", ["spool", "upstream", "both"])
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.manifest.json", "COMMIT.json"])
def test_a_damaged_byte_in_each_file_in_turn(node: Node, tmp_path: Path, where: str, name: str):
    """C4, F40: begin, middle and end. Right values always; the newest, where one tier has it whole."""
    upstream = tmp_path / "up"
    node.start("checkpoint")
    for number, place in enumerate((0.0, 0.5, 1.0)):
        trainer = Checkpointer(f"run{number}", upstream=str(upstream))
        trainer.save(1, state(1)).wait()
        trainer.save(2, state(2)).wait()
        trainer.close()
        for root in (node.settings.spool_dir / "runs", upstream):
            if where in ("both", "spool" if root != upstream else "upstream"):
                (path,) = root.glob(f"run{number}/step-000000002/*/{name}")
                data = bytearray(path.read_bytes())
                data[int(place * (len(data) - 1))] ^= 1
                path.write_bytes(data)
        step, found = Checkpointer(f"run{number}", upstream=str(upstream)).restore()
        assert value_of(found) == step
        # A manifest has done its work once there is a commit. Some bytes of a commit matter to no reader.
        needed = where == "both" and name == "rank-00000.safetensors"
        assert step == (1 if needed else 2) or (where == "both" and name == "COMMIT.json")


def test_retention_beside_restores(node: Node, tmp_path: Path):
    """C5: each restore gets a whole checkpoint, however fast they come and go."""
    node.set(FOREBAY_CHECKPOINT__KEEP_LOCAL="1")
    node.start("checkpoint")
    upstream = str(tmp_path / "up")
    trainer = Checkpointer("run", upstream=upstream, keep=Keep(last=1))
    trainer.save(1, state(1)).wait()
    over = threading.Event()
    problems: list[BaseException] = []
    seen: list[int] = []

    def restore_again_and_again() -> None:
        reader = Checkpointer("run", upstream=upstream)
        while not over.is_set():
            try:
                step, found = reader.restore()
                assert value_of(found) == step
                seen.append(step)
            except (NoCheckpoint, AssertionError) as err:
                problems.append(err)
                return

    readers = [threading.Thread(target=restore_again_and_again) for _ in range(2)]
    for thread in readers:
        thread.start()
    for step in range(2, 300):
        trainer.save(step, state(step)).wait()
        if problems or (step > 40 and len(set(seen)) > 3):
            break
    over.set()
    for thread in readers:
        thread.join()
    assert not problems
    assert len(set(seen)) > 3
