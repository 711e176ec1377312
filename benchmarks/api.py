"""`forebay bench api`: requests per second, latency beside staging, a job's first byte, the dashboard."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import obstore

from forebay.api.client import Client
from forebay.benchmarks.daemons import running_daemon
from forebay.benchmarks.host import DD_BLOCK_BYTES, confine, confined, dd
from forebay.benchmarks.report import Case, Report
from forebay.benchmarks.seaweed import S3Server, free_ports, running_server
from forebay.benchmarks.settings import environment
from forebay.benchmarks.tap import tapped
from forebay.core.spawn import spawn

if TYPE_CHECKING:
    from playwright.sync_api import Page, Response

_MIB = 1 << 20
_CONNECTIONS = 4
_LOAD_S = 4.0
_LOOKS = 1000
_LOOK_PAUSE_S = 0.005
_BULK_SHARDS, _BULK_BYTES = 24, 64 * _MIB
_JOBS = 100
_DISK_BLOCKS = 128


def bench(seed: int) -> Report:
    noise = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        with running_server() as server, environment(**server.env):
            cases = [
                _throughput(server, folder / "gets", noise),
                _beside_staging(folder / "beside", noise),
                _first_byte(server, folder / "first", noise),
            ]
            if chromium := shutil.which("chromium"):
                cases.append(_page(server, folder / "page", chromium, noise))
    return Report("api", {key: value for case in cases for key, value in case.figures.items()}, cases, seed)


@contextmanager
def _service(home: Path, **variables: str) -> Iterator[tuple[str, int]]:
    """A stagerd and an API; its URL, and the API's process."""
    port = free_ports(1)[0]
    own = {"FOREBAY_HOME": str(home), "FOREBAY_API__PORT": str(port), "FOREBAY_API__RATE": "0"}
    settings = environment(**own, FOREBAY_STAGER__RESERVE="0", **variables)
    with settings, running_daemon("stager", {}), running_daemon("api", {}) as api:
        yield f"http://127.0.0.1:{port}", api.pid


def _throughput(server: S3Server, home: Path, noise: np.random.Generator) -> Case:
    """The API on one core of its own; who asks it, and stagerd, on the others."""
    _upload(server, "gets", 4, _MIB, noise)
    core, *others = sorted(os.sched_getaffinity(0))
    with _service(home) as (url, pid), Client(url) as client:
        client.register(server.url("gets"), name="gets")
        job = client.wait(client.stage("gets"))
        confine(pid, {core})
        paths = {
            "healthz": "/healthz",
            "job": f"/v1/stage-jobs/{job.id}",
            "dataset": "/v1/datasets/gets",
            "tiers": "/v1/tiers",
        }
        with confined(set(others) or {core}):
            rates = {path: _gets_per_s(url, path) for path in paths.values()}
            floor = _floor(core)
    named = {f"gets_per_s_{name}": rates[path] for name, path in paths.items()}
    slowest = min(rates.values())
    figures = {"gets_per_s": slowest, "gets_over_floor": slowest / floor, **named}
    note = f"{_CONNECTIONS} connections that stay open; floor: a constant from Starlette on the same uvicorn"
    return Case(
        "GET of small resources, the API on one core", figures, {"floor": {"gets_per_s": floor}}, note
    )


_FLOOR = """
import sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from forebay.core.systemd import notify

async def constant(request):
    return JSONResponse({"status": "ok"})

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        notify("READY=1")

app = Starlette(routes=[Route("/", constant)])
Server(uvicorn.Config(app, port=int(sys.argv[1]), log_level="warning", access_log=False, loop="uvloop")).run()
"""


def _floor(core: int) -> float:
    port = free_ports(1)[0]
    process = spawn([sys.executable, "-c", _FLOOR, str(port)])
    try:
        confine(process.pid, {core})
        return _gets_per_s(f"http://127.0.0.1:{port}", "/")
    finally:
        process.terminate()
        process.wait()


def _gets_per_s(url: str, path: str) -> float:
    """Bare sockets: a client library would be what is measured."""
    host = url.removeprefix("http://")
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    until = time.perf_counter() + _LOAD_S
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        asked = [pool.submit(_ask_until, until, host, request) for _ in range(_CONNECTIONS)]
        return sum(each.result() for each in asked) / _LOAD_S


def _ask_until(until: float, host: str, request: bytes) -> int:
    name, port = host.split(":")
    count = 0
    with socket.create_connection((name, int(port)), 10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while time.perf_counter() < until:
            sock.sendall(request)
            answer = _answer(sock)
            assert answer.startswith(b"HTTP/1.1 200"), answer[:100]
            count += 1
    return count


def _answer(sock: socket.socket) -> bytes:
    got = b""
    while b"\r\n\r\n" not in got:
        got += _some(sock)
    head, _, body = got.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    (length,) = (int(line[15:]) for line in lines if line.startswith(b"content-length:"))
    while len(body) < length:
        body += _some(sock)
    return head


def _some(sock: socket.socket) -> bytes:
    got = sock.recv(65536)
    assert got, "the API hung up"
    return got


def _beside_staging(home: Path, noise: np.random.Generator) -> Case:
    """From a folder on the same disk, the page cache in between: stagerd writes as fast as it can."""
    source = home.with_name("source")
    source.mkdir()
    for number in range(_BULK_SHARDS):
        (source / f"{number:05d}.tar").write_bytes(noise.bytes(_BULK_BYTES))
    disk_bps = _disk_bps(home.parent)
    with _service(home, FOREBAY_API__SOURCES='["file://"]') as (url, _), Client(url) as client:
        client.register(f"file://{source}", name="bulk")
        alone = _looks(url)
        ended, moving = threading.Event(), threading.Event()
        staged: list[float] = []
        worker = threading.Thread(target=_stage_for_ever, args=(url, moving, ended, staged))
        worker.start()
        moving.wait()
        beside = _looks(url)
        ended.set()
        worker.join()
    p99_ms = _percentile_ms(beside, 99)
    figures = {
        "tiers_p99_ms": p99_ms,
        "tiers_p99_alone_ms": _percentile_ms(alone, 99),
        "tiers_p50_ms": _percentile_ms(beside, 50),
        "staging_over_disk": float(np.median(staged)) / disk_bps,
    }
    note = "staging_over_disk: what stagerd wrote meanwhile over dd oflag=direct before it"
    return Case(
        f"GET /v1/tiers beside stage jobs of {_BULK_SHARDS} x 64 MiB, over and over", figures, {}, note
    )


def _looks(url: str) -> list[float]:
    host = url.removeprefix("http://")
    request = f"GET /v1/tiers HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    name, port = host.split(":")
    took = []
    with socket.create_connection((name, int(port)), 10) as sock:
        for _ in range(_LOOKS):
            began_at = time.perf_counter()
            sock.sendall(request)
            _answer(sock)
            took.append(time.perf_counter() - began_at)
            time.sleep(_LOOK_PAUSE_S)
    return took


def _stage_for_ever(url: str, moving: threading.Event, ended: threading.Event, staged: list[float]) -> None:
    """Rates of whole rounds, in bytes per second."""
    with Client(url) as client:
        while not ended.is_set():
            began_at = time.perf_counter()
            job = client.stage("bulk")
            moving.set()
            job = client.wait(job)
            assert job.state == "done", job
            staged.append(job.bytes_done / (time.perf_counter() - began_at))
            client.evict("bulk")


def _disk_bps(folder: Path) -> float:
    file = folder / "floor"
    took_s = dd("if=/dev/zero", f"of={file}", f"count={_DISK_BLOCKS}", "oflag=direct", "conv=fsync")
    file.unlink()
    return _DISK_BLOCKS * DD_BLOCK_BYTES / took_s


def _first_byte(server: S3Server, home: Path, noise: np.random.Generator) -> Case:
    """From the POST of a stage job to the source's port hearing of its shard."""
    _upload(server, "first", _JOBS, 4096, noise)
    waits = []
    with (
        tapped(server.port, b"GET /forebay/first/") as tap,
        _service(home, AWS_ENDPOINT_URL=tap.url) as (url, _),
        Client(url) as client,
    ):
        client.register(server.url("first"), name="first")
        for number in range(_JOBS):
            tap.arm()
            began_at = time.perf_counter()
            job = client.stage("first", glob=f"{number:05d}.tar")
            waits.append(tap.heard_at(timeout_s=10) - began_at)
            assert client.wait(job).state == "done"
    figures = {
        "first_byte_p50_ms": _percentile_ms(waits, 50),
        "first_byte_p99_ms": _percentile_ms(waits, 99),
    }
    return Case("POST of a stage job to its first request at the source", figures)


def _page(server: S3Server, home: Path, chromium: str, noise: np.random.Generator) -> Case:
    """What a browser that was never here transfers, and when it paints; the page itself has the data."""
    from playwright.sync_api import sync_playwright

    _upload(server, "page", 4, _MIB, noise)
    with _service(home) as (url, _), Client(url) as client, sync_playwright() as playwright:
        client.register(server.url("page"), name="shown")
        client.wait(client.stage("shown"))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        paints, transferred = [], []
        for _ in range(10):
            context = browser.new_context()
            page = context.new_page()
            answers = _visit(page, url)
            assert "shown" in answers[0].text(), "the first answer has the data"
            paints.append(page.evaluate(_FIRST_PAINT) / 1e3)
            sizes = [answer.request.sizes() for answer in answers]
            transferred.append(sum(s["responseBodySize"] + s["responseHeadersSize"] for s in sizes))
            context.close()
        browser.close()
    figures = {
        "page_kb": max(transferred) / 1e3,
        "first_paint_ms": _percentile_ms(paints, 50),
        "first_paint_worst_ms": max(paints) * 1e3,
    }
    return Case("the dashboard in headless Chromium, nothing cached", figures)


def _visit(page: Page, url: str) -> list[Response]:
    """What the browser was sent, the page itself first."""
    answers: list[Response] = []

    def keep(answer: Response) -> None:
        answers.append(answer)

    page.on("response", keep)
    page.goto(url, wait_until="load")
    return answers


_FIRST_PAINT = """() => new Promise(done => {
  const found = () => performance.getEntriesByName('first-contentful-paint')[0];
  if (found()) done(found().startTime);
  else new PerformanceObserver(() => found() && done(found().startTime))
    .observe({type: 'paint', buffered: true});
})"""


def _percentile_ms(seconds: list[float], percent: float) -> float:
    return float(np.percentile(seconds, percent)) * 1e3


def _upload(
    server: S3Server, prefix: str, objects: int, object_bytes: int, noise: np.random.Generator
) -> None:
    for number in range(objects):
        body = noise.bytes(object_bytes)
        obstore.put(server.store(), f"{prefix}/{number:05d}.tar", body, use_multipart=False)
