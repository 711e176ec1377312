"""REST as programs use it: pages, keys, limits, daemons that are away, and what it says of itself."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import httpx
import obstore
import pytest
import torch

from forebay.api.client import AsyncClient, Client, calls
from forebay.benchmarks.seaweed import S3Server
from forebay.checkpointd import Checkpointer
from forebay.core.errors import DatasetNotFound, NoCheckpoint, WrongState
from tests.conftest import Node, eventually
from tests.integration.api import Service, own_node, problem, read_until_closed, slow_source

MakeDataset = Callable[[list[int], int], str]


@pytest.fixture(scope="module")
def shared(s3: S3Server) -> Iterator[Service]:
    """One service for the tests that neither end it nor set it up otherwise."""
    with own_node() as node:
        yield Service(node, FOREBAY_API__RATE="0").start()


@pytest.fixture
def service(node: Node, s3: S3Server) -> Service:
    return Service(node)


def test_shards_in_pages(shared: Service, make_dataset: MakeDataset):
    url = make_dataset([1] * 25, 10)
    with shared.client() as client:
        dataset = client.register(url, name="pages")
        found = list(client.all(calls.shards("pages", limit=7)))
        assert [shard.number for shard in found] == list(range(25)) and not any(s.staged for s in found)
        client.wait(client.stage(dataset.id, glob="*-00[0-4].tar"))
        assert [s.number for s in client.all(calls.shards("pages", staged=True, limit=2))] == [0, 1, 2, 3, 4]
        assert len(list(client.all(calls.shards("pages", glob="*-01*")))) == 10
        with pytest.raises(DatasetNotFound):
            client.shards("no-such")


def test_jobs_datasets_and_pins_in_pages_and_filtered(shared: Service, make_dataset: MakeDataset):
    url = make_dataset([1], 10)
    with shared.client() as client:
        names = [f"filter-{number}" for number in range(5)]
        for name in names:
            client.register(url, name=name)
        assert [d.name for d in client.all(calls.datasets(name="filter-*", limit=2))] == names
        jobs = [client.wait(client.stage(name, owner=f"me-{name}")) for name in names]
        assert [j.id for j in client.all(calls.jobs(limit=2)) if j.dataset in names] == [j.id for j in jobs][
            ::-1
        ]
        assert [j.id for j in client.jobs(owner="me-filter-3").items] == [jobs[3].id]
        assert [j.id for j in client.jobs(dataset="filter-2", state="done").items] == [jobs[2].id]
        assert client.jobs(dataset="filter-2", state="running").items == []
        pins = [client.pin("filter-1", owner=f"keep-{number}") for number in range(3)]
        assert [p.id for p in client.all(calls.pins(limit=1)) if p in pins] == [p.id for p in pins]
        assert client.pins(owner="keep-1").items == [pins[1]]
        assert client.evict("filter-1", dry_run=True).kept == 1, "pinned"
        for pin in pins:
            client.unpin(pin.id)
        assert client.evict("filter-1", dry_run=True).shards == client.evict("filter-1").shards == 1
        assert client.evict("filter-1").shards == 0


def test_an_etag_saves_what_has_not_changed(shared: Service, make_dataset: MakeDataset):
    url = make_dataset([1], 10)
    with shared.http() as http:
        http.post("/v1/datasets", json={"url": url, "name": "tagged"})
        first = http.get("/v1/datasets/tagged")
        again = http.get("/v1/datasets/tagged", headers={"If-None-Match": f'"x", {first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert http.get("/v1/datasets/tagged", headers={"If-None-Match": '"other"'}).status_code == 200
        http.post("/v1/stage-jobs", json={"dataset": "tagged"})
        assert eventually(
            lambda: (
                http.get("/v1/datasets/tagged", headers={"If-None-Match": first.headers["etag"]}).is_success
            )
        )


def test_the_async_client_does_the_same(shared: Service, make_dataset: MakeDataset):
    url = make_dataset([1] * 3, 10)

    async def main() -> None:
        async with AsyncClient(shared.url) as client:
            await client.register(url, name="async")
            job = await client.wait(await client.stage("async"))
            assert (job.state, job.shards_done) == ("done", 3)
            assert len([s async for s in client.all(calls.shards("async", limit=2))]) == 3
            with pytest.raises(WrongState):
                await client.retry(job.id)
            assert (await client.tiers()).hot.shards >= 3

    anyio.run(main)


def test_checkpoints_over_rest(shared: Service, s3: S3Server, prefix: str):
    upstream = s3.url(f"{prefix}-ckpt")
    checkpoints = Checkpointer("rest", upstream=upstream)
    for step in (1, 2, 3):
        checkpoints.save(step, {"w": torch.ones(10)}).wait()
    with shared.client() as client:
        assert [c.step for c in client.checkpoints("rest", upstream=upstream).items][:1] == [3]
        assert "rest" in {c.run for c in client.checkpoints().items}
        shown = client.checkpoint("rest", 2, upstream=upstream)
        assert shown.checkpoint.step == 2 and shown.files[0].tiers[-1] == "upstream"
        assert client.verify("rest", 2, upstream=upstream).items[0].problem is None
        assert {s.level for s in client.saves(run="rest").items} == {"committed"}
        with pytest.raises(WrongState, match="newest"):
            client.remove("rest", 3, upstream=upstream)
        client.pin_checkpoint("rest", 1, upstream=upstream)
        with pytest.raises(WrongState, match="pinned"):
            client.remove("rest", 1, upstream=upstream)
        client.unpin_checkpoint("rest", 1, upstream=upstream)
        assert [c.step for c in client.remove("rest", 1, upstream=upstream, dry_run=True).items] == [1]
        assert client.remove("rest", 1, upstream=upstream).items[0].step == 1
        with pytest.raises(NoCheckpoint):
            client.remove("rest", 1, upstream=upstream)


def test_every_failure_is_a_problem_that_says_what_to_do(shared: Service):
    with shared.http() as http:
        for reply, expected in [
            (http.get("/v1/datasets/none"), (404, "dataset_not_found")),
            (http.get("/v1/shards", params={"dataset": "none"}), (404, "dataset_not_found")),
            (http.get("/v1/shards"), (422, "invalid_request")),
            (http.get("/v1/shards", params={"dataset": "x", "cursor": "!"}), (422, "invalid_request")),
            (http.get("/v1/stage-jobs", params={"cursor": "abcd"}), (400, "invalid_request")),
            (http.get("/v1/stage-jobs", params={"limit": 0}), (422, "invalid_request")),
            (http.get("/v1/stage-jobs/none"), (404, "not_found")),
            (http.get("/v1/stage-jobs/none/events"), (404, "not_found")),
            (http.delete("/v1/stage-jobs/none"), (404, "not_found")),
            (http.post("/v1/stage-jobs/none/retry"), (404, "not_found")),
            (http.post("/v1/stage-jobs", json={"dataset": "none"}), (404, "dataset_not_found")),
            (http.post("/v1/stage-jobs", json={"dataset": "x", "priority": -1}), (422, "invalid_request")),
            (http.post("/v1/stage-jobs", content=b"{"), (422, "invalid_request")),
            (http.post("/v1/datasets", json={"url": "s3://no-such-bucket/x"}), (404, "bucket_not_found")),
            (http.post("/v1/datasets", json={"uri": "s3://b"}), (422, "invalid_request")),
            (http.post("/v1/datasets", json={"url": "file:///etc"}), (403, "forbidden")),
            (http.post("/v1/datasets/none/evict", json={}), (404, "dataset_not_found")),
            (http.post("/v1/pins", json={"dataset": "none"}), (404, "dataset_not_found")),
            (http.delete("/v1/pins/none"), (404, "not_found")),
            (http.get("/v1/runs/..evil/checkpoints"), (422, "invalid_request")),
            (http.get("/v1/runs/none/checkpoints/1"), (404, "no_checkpoint")),
            (http.get("/v1/runs/none/checkpoints/-1"), (422, "invalid_request")),
            (http.delete("/v1/runs/none/checkpoints/1"), (404, "no_checkpoint")),
            (http.post("/v1/runs/none/checkpoints/1/verify"), (404, "no_checkpoint")),
            (http.put("/v1/runs/none/checkpoints/1/pin"), (404, "no_checkpoint")),
            (http.get("/v1/runs/x/checkpoints", params={"upstream": "file:///etc"}), (403, "forbidden")),
            (http.post("/v1/nodes/stage-jobs", json={"dataset": "x"}), (400, "invalid_request")),
            (http.get("/v1/nothing"), (404, "not_found")),
            (http.get("/static/../../pyproject.toml"), (404, "not_found")),
            (http.get("/static/%2e%2e/%2e%2e/server.py"), (404, "not_found")),
            (http.get("/static/..%2f..%2fserver.py"), (404, "not_found")),
            (http.patch("/v1/datasets"), (405, "method_not_allowed")),
        ]:
            assert problem(reply) == expected, (reply.request.method, reply.request.url, reply.text)
        assert http.patch("/v1/datasets").headers["allow"] == "GET, POST"


def test_a_key_does_it_once_whoever_is_restarted(service: Service, make_dataset: MakeDataset):
    slow_source(service)
    service.start("stager", "api")
    url = make_dataset([1] * 3, 10)
    with service.http() as http:
        dataset = http.post("/v1/datasets", json={"url": url, "name": "d"}, headers={"Idempotency-Key": "r"})
        key = {"Idempotency-Key": "job-1"}
        first = http.post("/v1/stage-jobs", json={"dataset": "d"}, headers=key)
        pin = http.post("/v1/pins", json={"dataset": "d"}, headers={"Idempotency-Key": "pin"})
        for part in ("stager", "api"):
            service.node.kill(part)
            service.node.start(part)
        again = http.post("/v1/stage-jobs", json={"dataset": "d"}, headers=key)
        assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
        assert (
            http.post("/v1/pins", json={"dataset": "d"}, headers={"Idempotency-Key": "pin"}).json()
            == pin.json()
        )
        repeated = http.post("/v1/datasets", json={"url": url, "name": "d"}, headers={"Idempotency-Key": "r"})
        assert repeated.json()["id"] == dataset.json()["id"]
        other = http.post("/v1/stage-jobs", json={"dataset": "d", "priority": 2.0}, headers=key)
        assert problem(other) == (422, "key_reused")
        assert len(http.get("/v1/stage-jobs").json()["items"]) == 1
        assert (
            problem(http.post("/v1/pins", json={"dataset": "d"}, headers={"Idempotency-Key": "x" * 300}))[0]
            == 422
        )


def test_requests_that_are_too_large_too_slow_or_packed(service: Service):
    service.node.set(FOREBAY_API__BODY="10KB", FOREBAY_API__RECEIVE_S="1")
    service.start("api")
    with service.http() as http:
        assert problem(http.post("/v1/datasets", content=b"x" * 11_000)) == (413, "too_large")
        chunks = (b"x" * 1000 for _ in range(100))
        assert problem(http.post("/v1/datasets", content=chunks)) == (413, "too_large")
        packed = http.post("/v1/datasets", content=b"x", headers={"Content-Encoding": "gzip"})
        assert problem(packed) == (415, "unsupported_encoding")
    # A head, and a body, that do not come to their end.
    for sent, status in (
        (b"", b"408"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-", b"408"),
        (b"POST /v1/datasets HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", b"408"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"y" * 200_000, b"431"),
        (b"\x16\x03\x01 nonsense\r\n\r\n", b"400"),
    ):
        with service.socket() as sock:
            for start in range(0, len(sent), 10_000):
                sock.sendall(sent[start : start + 10_000])
            answer = read_until_closed(sock)
            assert answer[9:12] == status, (sent[:60], answer[:200])
    with service.http() as http:
        assert http.get("/healthz").is_success


def test_whoever_asks_too_often_is_told_when_to_come_back(service: Service):
    service.node.set(FOREBAY_API__RATE="5")
    service.start("api")
    with service.http() as http:
        replies = [http.get("/healthz") for _ in range(12)]
        assert {r.status_code for r in replies} == {200, 429}
        refused = next(r for r in replies if r.status_code == 429)
        assert problem(refused) == (429, "too_busy") and refused.headers["retry-after"] == "1"
    with Client(service.url, patience_s=20) as client:
        # Its own patience sees it through; stagerd is not there, which is another thing.
        assert [client.node().stager for _ in range(8)] == [None] * 8


def test_two_hundred_clients_at_once(shared: Service):
    def ask(number: int) -> list[int]:
        with shared.http() as http:
            return [
                http.get(path).status_code
                for path in ("/v1/tiers", "/v1/datasets", "/v1/stage-jobs", "/healthz")
            ]

    with ThreadPoolExecutor(200) as pool:
        assert set(itertools.chain(*pool.map(ask, range(200)))) == {200}


def test_a_daemon_that_is_away_is_named(service: Service):
    service.start("api")
    with service.http() as http:
        assert http.get("/healthz").is_success
        for path in ("/readyz", "/v1/tiers", "/v1/datasets", "/v1/saves", "/v1/lockstep"):
            reply = http.get(path)
            assert problem(reply) == (503, "daemon_unavailable") and reply.headers["retry-after"]
            assert "forebay up" in reply.json()["hint"]
        assert set(http.get("/v1/overview").json()["away"]) == {"stagerd", "checkpointd"}
        assert set(http.get("/v1/node").json()["problems"]) == {"stager", "checkpoint"}
        assert "# stager: nobody answers" in http.get("/metrics").text
        service.start("stager", "checkpoint")
        assert http.get("/readyz").json() == {"status": "ready"}
        assert "forebay_api_requests_total" in http.get("/metrics").text


def test_an_overview_asks_a_daemon_that_hangs_once(service: Service):
    """It is named as away; what it would have told is left out, and not waited for again."""
    daemon = service.node.start("stager")
    service.start("checkpoint", "api")
    daemon.send_signal(signal.SIGSTOP)
    try:
        with service.client() as client:
            found = client.overview()
    finally:
        daemon.send_signal(signal.SIGCONT)
    assert set(found.away) == {"stagerd"} and found.tiers is None and found.ranks == []


def test_recent_problems_are_shown_without_secrets(service: Service, s3: S3Server, prefix: str):
    secret = "hunter2hunter2"
    service.node.set(
        FOREBAY_WARM__URL=str(service.node.home / "warm"),
        FOREBAY_WARM__COORDINATOR=f"redis://:{secret}@127.0.0.1:1/0",
    )
    service.start()
    obstore.put(s3.store(), f"{prefix}/a.tar", b"x" * 1000, use_multipart=False)
    with service.client() as client:
        client.register(s3.url(prefix), name="d", format="raw")
        client.wait(client.stage("d"))
        assert any("warm" in item.problem.event for item in client.problems().items)
        with service.http() as http:
            shown = [http.get(p).text for p in ("/v1/problems", "/v1/overview", "/v1/node", "/", "/metrics")]
    shown += [service.node.log(part) for part in ("stager", "api")]
    run = subprocess.run(
        [sys.executable, "-m", "forebay.api.cli", "config", "show"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not any(secret in text for text in [*shown, run.stdout])
    assert "redis://***@127.0.0.1" in run.stdout


def test_each_change_leaves_a_line(shared: Service, make_dataset: MakeDataset):
    url = make_dataset([1], 10)
    with shared.http() as http:
        made = http.post("/v1/datasets", json={"url": url, "name": "audited"})
        http.get("/v1/datasets/audited")
    line = next(line for line in reversed(shared.audit()) if line["request"] == made.headers["x-request-id"])
    assert (line["who"], line["method"], line["path"], line["status"]) == (
        "anonymous",
        "POST",
        "/v1/datasets",
        201,
    )
    assert not any(line["method"] == "GET" for line in shared.audit())


def test_the_service_is_what_its_openapi_says(shared: Service, make_dataset: MakeDataset, tmp_path: Path):
    """Schemathesis: no fault, and no answer that the document does not allow."""
    with shared.client() as client:
        client.register(make_dataset([1] * 3, 10), name="fuzzed")
        client.wait(client.stage("fuzzed"))
    run = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")), "run", f"{shared.url}/openapi.json",
            # That a job has ended, or a name is taken, no document can say.
            "--checks", "all", "--exclude-checks", "positive_data_acceptance", "--seed", "1",
            "--phases", "coverage,fuzzing", "--max-examples", "10", "--no-color",
        ],
        capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-5000:]
    assert "request failed" not in shared.node.log("api")
    with httpx.Client(base_url=shared.url) as http:
        assert http.get("/openapi.json").json()["openapi"].startswith("3.1")
