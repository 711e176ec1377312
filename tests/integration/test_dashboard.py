"""The dashboard in a real browser: it shows, it moves, it cancels, and it talks to nobody else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright

from forebay.benchmarks.seaweed import S3Server
from tests.conftest import Node, eventually, shard_bytes
from tests.integration.api import BIG, Service, slow_source
from tests.integration.test_dcp import torchrun

MakeDataset = Callable[[list[int], int], str]
CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MOST_BYTES = 150_000

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed (make browser)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


class Watched:
    """A page, with all that it asked for and complained of."""

    def __init__(self, browser: Browser, width: int = 1100, scheme: str = "light") -> None:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        self.page: Page = context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda err: self.complaints.append(str(err)))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


def test_it_shows_moves_and_cancels(node: Node, s3: S3Server, make_dataset: MakeDataset, browser: Browser):
    service = Service(node)
    slow_source(service, 2 * BIG)
    service.start()
    url = make_dataset([1] * 40, BIG)
    watched = Watched(browser)
    page = watched.page
    with service.client() as client:
        page.goto(service.url)
        expect(page.get_by_role("heading", name="Stage jobs")).to_be_visible()
        expect(page.get_by_text("None yet")).to_be_visible()
        client.register(url, name="slow")
        job = client.stage("slow")
        row = page.locator(f"#job-{job.id}")
        expect(row).to_contain_text("running", timeout=20_000)
        expect(row).to_contain_text("3/40", timeout=30_000)
        page.get_by_role("button", name="Cancel staging of slow").press("Enter")
        expect(row).to_contain_text("cancelled", timeout=20_000)
        assert client.job(job.id).state == "cancelled"
        expect(page.locator("#chart canvas")).to_be_visible()
    assert watched.complaints == []
    assert all(asked.startswith(service.url) for asked in watched.asked), watched.asked


RANKS = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from forebay.checkpointd import Checkpointer
from forebay.loaders import DataLoader, StagedDataset
from forebay.loaders.pacing import Pacing
dist.init_process_group("gloo")
saves = Checkpointer("resnet-50")
dataset = StagedDataset(sys.argv[1], fields=("__key__",))
loader = DataLoader(dataset, 2, pacing=Pacing(interval_s=0.2, gate_s=5.0))
step, ended = 0, torch.zeros(1)
while not ended:
    for batch in loader:
        step += 1
        time.sleep(0.05)
        if step % 20 == 0:
            saves.save(step, {"w": torch.full((250_000,), float(step))})
        ended[0] = Path(sys.argv[2]).exists()
        dist.all_reduce(ended)
        if ended:
            break
saves.close()
dist.destroy_process_group()
"""


@pytest.mark.alone
def test_it_shows_ranks_and_goes_on_over_a_restart(
    node: Node, s3: S3Server, prefix: str, make_dataset: MakeDataset, browser: Browser, tmp_path: Path
):
    """Two ranks train and save, a job stages slowly, stagerd is killed and comes back: it is all seen."""
    service = Service(node)
    slow_source(service, 2 * BIG)
    service.start()
    script, ended = tmp_path / "ranks.py", tmp_path / "ended"
    script.write_text(RANKS)
    with service.client() as client, ThreadPoolExecutor(1) as pool:
        for shard in range(4):
            obstore.put(s3.store(), f"{prefix}-ranks/{shard}.tar", shard_bytes(shard, 60))
        job = client.stage(client.register(make_dataset([1] * 60, BIG), name="laion-captions").name)
        training = pool.submit(torchrun, 2, str(script), s3.url(f"{prefix}-ranks"), str(ended))
        watched = Watched(browser)
        page = watched.page
        try:
            page.goto(service.url)
            ranks = page.locator("section[aria-labelledby=lockstep-title] tbody tr")
            expect(ranks).to_have_count(2, timeout=60_000)
            saves = page.locator("section[aria-labelledby=saves-title]")
            expect(saves.locator("tr", has_text="resnet-50").first).to_contain_text("2/2", timeout=60_000)
            page.screenshot(path=os.environ.get("FOREBAY_SCREENSHOT", node.home / "page.png"), full_page=True)
            before = client.job(job.id).shards_done, step_of(ranks)
            node.kill()
            expect(page.get_by_text("stagerd is away")).to_be_visible(timeout=20_000)
            service.start("stager")
            expect(page.get_by_text("stagerd is away")).to_be_hidden(timeout=20_000)
            expect(ranks).to_have_count(2, timeout=60_000)
            assert eventually(lambda: step_of(ranks) > before[1], 30)
            row = page.locator(f"#job-{job.id}")
            assert eventually(lambda: done_of(row) > before[0], 60), (before, row.text_content())
            assert client.job(job.id).state == "running"
        finally:
            ended.touch()
        training.result(60)
    assert [line for line in watched.complaints if "503" not in line] == []


def step_of(ranks: Locator) -> int:
    return int(ranks.first.locator("td").first.text_content() or 0)


def done_of(row: Locator) -> int:
    """`12/60` in its row."""
    return int((row.locator("td").nth(1).text_content() or "0/").partition("/")[0])


def test_it_weighs_little_and_fits_a_phone(node: Node, browser: Browser):
    service = Service(node).start("api")
    watched = Watched(browser, width=390, scheme="dark")
    watched.page.goto(service.url)
    expect(watched.page.get_by_text("stagerd is away")).to_be_visible()
    assert watched.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    with service.http() as http:
        sizes = [
            len(http.get(asked).content) for asked in dict.fromkeys(watched.asked) if "/ui/" not in asked
        ]
    assert sum(sizes) < MOST_BYTES
    assert watched.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 26)"


def test_it_asks_who_the_viewer_is(node: Node, browser: Browser):
    service = Service(node, FOREBAY_API__ANONYMOUS="false").start("stager", "api")
    token = service.token("read")
    watched = Watched(browser)
    page = watched.page
    page.goto(service.url)
    assert page.url.endswith("/login")
    page.get_by_label("Token").fill("fb_wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not known")
    page.get_by_label("Token").fill(token)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Lockstep")).to_be_visible()
    cookie = page.context.cookies()[0]
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    page.get_by_role("button", name="Sign out").click()
    assert page.url.endswith("/login") and page.context.cookies() == []


def test_an_old_cookie_does_not_shut_the_door(node: Node):
    service = Service(node, FOREBAY_API__ANONYMOUS="false").start("api")
    with service.http(cookies={"forebay_token": "fb_old"}) as http:
        assert http.get("/", follow_redirects=True).url.path == "/login"
        for path in ("/static/../server.py", "/static/vendor/../../pages.py"):
            assert http.get(path).status_code in (401, 404)
        assert "script-src 'self'" in http.get("/login").headers["content-security-policy"]
