"""A gateway over nodes: one question to all of them, and an answer even when some are away."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from forebay.benchmarks.seaweed import S3Server, free_ports
from forebay.core.errors import ForebayError, InvalidRequest
from tests.conftest import eventually
from tests.integration.api import Service, own_node, problem

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
