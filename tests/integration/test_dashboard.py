"""The dashboard in a real browser: it shows, it moves, it cancels, and it talks to nobody else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from forebay.benchmarks.seaweed import S3Server
from tests.conftest import Node
from tests.integration.api import Service

MakeDataset = Callable[[list[int], int], str]
KB = 1000
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
        self.page.on(
            "console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda err: self.complaints.append(str(err)))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


def test_it_shows_moves_and_cancels(node: Node, s3: S3Server, make_dataset: MakeDataset, browser: Browser):
    service = Service(node, FOREBAY_SOURCE=json.dumps([{"url": "s3://forebay", "rate": 600 * KB}])).start()
    url = make_dataset([1] * 40, 300 * KB)
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
        page.screenshot(path=os.environ.get("FOREBAY_SCREENSHOT", node.home / "page.png"), full_page=True)
    assert watched.complaints == []
    assert all(asked.startswith(service.url) for asked in watched.asked), watched.asked


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
