"""A gateway over nodes: one question to all of them, and an answer even when some are away."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from forebay.api.client import Client
from forebay.benchmarks.seaweed import S3Server, free_ports
from forebay.core.errors import DaemonUnavailable, ForebayError, InvalidRequest
from forebay.core.protocol import RankState
from forebay.core.spawn import spawn
from forebay.loaders import StagedDataset
from tests.conftest import Node, eventually
from tests.integration.api import Service, own_node, problem
from tests.integration.cli import forebay
from tests.integration.redis import redis_url, running_redis

MakeDataset = Callable[[list[int], int], str]


@pytest.fixture
def nodes(s3: S3Server) -> Iterator[tuple[ExitStack, list[Service]]]:
    """Two of them, each with stagerd and an API, which another site may call by name."""
    with ExitStack() as stack:
        found = []
        for name in ("n1", "n2"):
            node = stack.enter_context(own_node())
            found.append(Service(node, FOREBAY_NODE=name).start("stager", "api"))
        yield stack, found


def test_a_gateway_asks_all_and_names_who_is_away(
    nodes: tuple[ExitStack, list[Service]], make_dataset: MakeDataset
):
    stack, (one, two) = nodes
    away = f"http://127.0.0.1:{free_ports(1)[0]}"
    known = [one.url, two.url, away]
    gateway = Service(
        stack.enter_context(own_node()), FOREBAY_NODE="gateway", FOREBAY_CLUSTER__NODES=json.dumps(known)
    ).start("api")
    url = make_dataset([1] * 2, 10)
    with gateway.client() as client:
        entries = {entry.url: entry for entry in client.nodes().items}
        assert [entries[service.url].state.node for service in (one, two)] == ["n1", "n2"]  # type: ignore[union-attr]
        assert entries[away].state is None and "no answer" in entries[away].problem.detail  # type: ignore[union-attr]
        begun = client.stage_on(url=url, name="everywhere", key="k")
        assert begun.failed == 1
        jobs = {item.url: item.job for item in begun.items if item.job}
        assert set(jobs) == {one.url, two.url}
        again = client.stage_on(url=url, name="everywhere", key="k")
        assert {item.url: item.job.id for item in again.items if item.job} == {
            u: j.id for u, j in jobs.items()
        }
        for service in (one, two):
            with service.client() as direct:
                assert direct.wait(jobs[service.url]).state == "done"
                assert direct.dataset("everywhere").staged_shards == 2
        assert client.stage_on([two.url], dataset="everywhere").items[0].job is not None
        assert list(client.lockstep(cluster=True).missing) == [away]
        with pytest.raises(InvalidRequest, match="no node of this cluster"):
            client.stage_on(["http://169.254.169.254"], dataset="x")
        with pytest.raises(ForebayError):
            client.stage_on(url="file:///etc")
        with gateway.http() as http:
            none = http.post("/v1/nodes/stage-jobs", json={"dataset": "unknown"})
            assert none.status_code == 502 and none.json()["failed"] == 3
            both = http.post("/v1/nodes/stage-jobs", json={"dataset": "x", "url": url})
            assert problem(both) == (400, "invalid_request")
        one.node.kill("stager")
        assert eventually(
            lambda: "stager" in {e.url: e for e in client.nodes().items}[one.url].state.problems  # type: ignore[union-attr]
        )


def test_a_gateway_shows_the_ranks_of_all_nodes(
    nodes: tuple[ExitStack, list[Service]], make_dataset: MakeDataset
):
    """On its page, in its overview and in `top`; a node that is away is named there, and no rank is lost."""
    stack, services = nodes
    dataset = StagedDataset(make_dataset([1] * 2, 10), fields=("__key__",))
    for rank, service in enumerate(services):
        socket = Path(service.node.home / "fb/run/stager.sock")
        session = stack.enter_context(dataset.open_session(socket=socket))
        session.open_plan([0, 1], 2)
        session.pace(None, RankState(rank, 7 + rank, 1.0, 9.0, 0.0, 30.0, 0.05, False))
    away = f"http://127.0.0.1:{free_ports(1)[0]}"
    known = json.dumps([*(service.url for service in services), away])
    gateway = Service(stack.enter_context(own_node()), FOREBAY_NODE="gateway", FOREBAY_CLUSTER__NODES=known)
    gateway.start("api")
    with gateway.client() as client, gateway.http() as http:
        for ranks in (client.overview().ranks, client.lockstep(cluster=True).items):
            assert [(r.node, r.state.rank, r.state.step) for r in ranks] == [("n1", 0, 7), ("n2", 1, 8)]
        assert away in client.overview().away
        page = http.get("/").text
        assert "<th>Node</th>" in page and "<td>n2</td>" in page and f"{away} is away" in page
    lines = forebay("--api", gateway.url, "top", "--once").stdout.splitlines()
    assert any(line.startswith("n2 1 ") for line in lines) and max(map(len, lines)) <= 80
    with services[0].client() as client:
        assert [rank.node for rank in client.overview().ranks] == ["n1"], "a node shows its own"


def test_nodes_announce_themselves_in_redis(node: Node, tmp_path: Path):
    """One that falls silent is gone after a while; without the directory nobody waits for ever."""
    with running_redis(tmp_path) as server, ExitStack() as stack:
        services = []
        for name in ("n1", "n2"):
            service = Service(stack.enter_context(own_node()), FOREBAY_NODE=name)
            service.node.set(FOREBAY_CLUSTER__REDIS=redis_url(server), FOREBAY_CLUSTER__URL=service.url)
            services.append(service.start("stager", "api"))
        with services[0].client() as client:

            def names() -> list[str]:
                return sorted(entry.state.node for entry in client.nodes().items if entry.state)

            assert eventually(lambda: names() == ["n1", "n2"])
            services[1].node.kill("api")
            assert eventually(lambda: names() == ["n1"] and len(client.nodes().items) == 1, 30)
            server.kill()
            server.wait()
            with pytest.raises(DaemonUnavailable, match=r"cluster\.redis does not answer"):
                client.nodes()


def may_unshare() -> bool:
    return subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="no mount namespaces here, so no name of our own")
def test_a_name_with_one_address_per_node(tmp_path: Path):
    """As a headless service has: two loopback addresses under one name, which only the gateway knows."""
    hosts = tmp_path / "hosts"
    addresses = ("127.0.0.2", "127.0.0.3")
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} forebay.internal\n" for a in addresses))
    with ExitStack() as stack:
        port = str(free_ports(1)[0])
        for name, address in zip(("n1", "n2"), addresses, strict=True):
            node = stack.enter_context(own_node())
            service = Service(node, FOREBAY_NODE=name, FOREBAY_API__HOST=address)
            node.set(FOREBAY_API__PORT=port)
            service.start("stager", "api")
        own = stack.enter_context(own_node())
        Service(own, FOREBAY_API__HOST="127.0.0.1", FOREBAY_CLUSTER__DNS=f"http://forebay.internal:{port}")
        serve = f"exec {sys.executable} -m forebay.api.cli serve api"
        command = ["unshare", "-m", "sh", "-c", f"mount --bind {hosts} /etc/hosts && {serve}"]
        gateway = spawn(command)
        stack.callback(gateway.wait)
        stack.callback(gateway.kill)
        with Client(f"unix://{own.settings.api_socket}") as client:
            found = {entry.url: entry for entry in client.nodes().items}
            assert set(found) == {f"http://{address}:{port}" for address in addresses}
            assert sorted(e.state.node for e in found.values() if e.state) == ["n1", "n2"]
            hosts.write_text("127.0.0.1 localhost\n")
            with pytest.raises(DaemonUnavailable, match=r"cluster\.dns"):
                client.nodes()
