"""Followers of a stage job over REST: events, long polls, restarts, and those that stop reading."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from forebay.benchmarks.seaweed import S3Server
from forebay.core.protocol import StageJob
from tests.conftest import Node, eventually
from tests.integration.api import BIG, Service, slow_source

MakeDataset = Callable[[list[int], int], str]


@pytest.fixture
def service(node: Node, s3: S3Server) -> Service:
    """Whose source is slow."""
    found = Service(node)
    slow_source(found)
    return found


def events(lines: Iterator[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Kind, id and data of each, as EventSource reads them."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.lstrip()
        elif "event" in fields:
            yield fields["event"], int(fields.get("id", -1)), json.loads(fields["data"])
            fields = {}


def test_progress_as_events_that_can_be_gone_on_with(service: Service, make_dataset: MakeDataset):
    service.start("stager", "api")
    url = make_dataset([1] * 20, BIG)
    with service.http() as http, service.client() as client:
        client.register(url, name="d")
        job = client.stage("d")
        path = f"/v1/stage-jobs/{job.id}/events"
        with http.stream("GET", path) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            seen = list(itertools.islice(events(stream.iter_lines()), 3))
        assert [kind for kind, _, _ in seen] == ["progress"] * 3
        last = seen[-1][1]
        with http.stream("GET", path, headers={"Last-Event-ID": str(last)}) as stream:
            rest = list(events(stream.iter_lines()))
        versions = [number for _, number, _ in seen + rest]
        assert versions == sorted(versions) and all(number > last for _, number, _ in rest)
        assert rest[-1][0] == "end" and rest[-1][2]["state"] == "done"
        with http.stream("GET", path, headers={"Last-Event-ID": str(rest[-1][1])}) as stream:
            assert [kind for kind, _, _ in events(stream.iter_lines())] == ["end"]
        assert http.get(path, headers={"Last-Event-ID": "x"}).status_code == 422


def test_a_long_poll_ends_when_the_job_moves(service: Service, make_dataset: MakeDataset):
    service.start("stager", "api")
    url = make_dataset([1] * 10, BIG)
    with service.client() as client:
        client.register(url, name="d")
        job = client.stage("d")
        moved = client.job(job.id, after=job.version, wait_s=30)
        assert moved.version > job.version
        done = client.wait(moved)
        assert client.job(job.id, after=done.version, wait_s=0.1) == done, "an ended job does not move"


def test_a_restart_in_the_middle_of_a_job(service: Service, make_dataset: MakeDataset):
    """Client and follower see it through, over kill -9 of stagerd and a stop of the API."""
    service.start("stager", "api")
    url = make_dataset([1] * 25, BIG)
    followed: list[tuple[str, int, dict[str, Any]]] = []
    seen: list[StageJob] = []
    with service.client() as client, service.http() as http:
        client.register(url, name="d")
        job = client.stage("d")

        def follow() -> None:
            with http.stream("GET", f"/v1/stage-jobs/{job.id}/events") as stream:
                for event in events(stream.iter_lines()):
                    followed.append(event)

        follower = threading.Thread(target=follow)
        waiter = threading.Thread(target=lambda: seen.append(client.wait(job, seen.append)))
        follower.start(), waiter.start()
        assert eventually(lambda: any(now.shards_done > 3 for now in seen))
        service.node.kill("stager")
        service.node.start("stager")
        assert eventually(lambda: any(now.version > 1 << 32 for now in seen), 30)
        assert eventually(lambda: any(number > 1 << 32 for _, number, _ in followed), 30), "its next life"
        # The follower's connection ends with the API, the client goes on by itself.
        service.node.stop("api")
        follower.join(timeout=30)
        service.node.start("api")
        waiter.join(timeout=60)
        assert not waiter.is_alive() and not follower.is_alive()
        assert seen[-1].state == "done" and seen[-1].shards_done == 25
        versions = [number for _, number, _ in followed]
        assert versions == sorted(versions)
        assert len(client.jobs().items) == 1


def test_the_service_ends_in_order(service: Service, make_dataset: MakeDataset):
    """Open requests come to their end, followers are sent home, and the port is free at once."""
    slow_source(service, BIG)
    service.start("stager", "api")
    url = make_dataset([1] * 25, BIG)
    with service.client() as client, service.http() as http:
        client.register(url, name="d")
        job = client.stage("d")
        with ThreadPoolExecutor() as pool, http.stream("GET", f"/v1/stage-jobs/{job.id}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines)
            polled = pool.submit(
                http.get, f"/v1/stage-jobs/{job.id}", params={"after": job.version + 1000, "wait_s": 2}
            )
            assert eventually(lambda: not polled.done())
            service.node.stop("api")
            list(lines)
        assert polled.result().is_success
    assert not service.node.settings.api_socket.exists()
    service.start("api")


def test_a_follower_that_stops_reading_holds_up_nobody(service: Service, make_dataset: MakeDataset):
    service.start("stager", "api")
    url = make_dataset([1] * 20, BIG)
    with service.client() as client, service.socket() as deaf:
        client.register(url, name="d")
        job = client.stage("d")
        deaf.sendall(f"GET /v1/stage-jobs/{job.id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert deaf.recv(1) == b"H"
        assert client.wait(job).state == "done"
        service.node.stop("api")
