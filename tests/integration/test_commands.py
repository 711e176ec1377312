"""What a person types besides staging: top, tokens, checkpoints, evict, doctor, topology, completion."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forebay.benchmarks.seaweed import S3Server
from forebay.checkpointd import Checkpointer
from tests.conftest import Node
from tests.integration.api import Service
from tests.integration.cli import forebay, refused

MakeDataset = Callable[[list[int], int], str]
_SECTIONS = ("TIERS", "LOCKSTEP", "STAGE JOBS", "CHECKPOINTS")


@pytest.fixture
def service(node: Node, s3: S3Server) -> Service:
    return Service(node).start()


def save(run: str, *steps: int) -> None:
    checkpointer = Checkpointer(run)
    for step in steps:
        checkpointer.save(step, {"w": torch.ones(1000)}).wait()


def test_top_fits_80_columns(service: Service, make_dataset: MakeDataset):
    forebay("stage", make_dataset([5] * 3, 2000), "--wait")
    save("a-run-with-a-very-long-name-that-nobody-would-type", 12_345_678)
    lines = forebay("top", "--once").stdout.splitlines()
    assert [name for name in _SECTIONS if any(line.startswith(name) for line in lines)] == list(_SECTIONS)
    assert max(map(len, lines)) <= 80
    assert any("3/3" in line and "done" in line for line in lines) and any(
        "12345678" in line for line in lines
    )
    overview = json.loads(forebay("top", "--json").stdout)
    assert overview["jobs"][0]["state"] == "done" and overview["saves"][0]["step"] == 12_345_678


def test_top_lives_in_a_terminal_until_it_is_told(service: Service):
    """It takes the other screen and gives it back; a daemon that dies meanwhile is a line, not the end."""
    master, slave = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-m", "forebay.api.cli", "top", "--interval", "0.2"],
        stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(slave)
    try:
        assert "LOCKSTEP" in read_until(master, "LOCKSTEP")
        service.node.kill("stager")
        assert "away" in read_until(master, "away")
        run.send_signal(signal.SIGINT)
        assert read_until(master, "\x1b[?1049l").endswith("\x1b[?1049l")
        assert run.wait(10) == 0
    finally:
        run.kill()
        run.wait()
        os.close(master)


def read_until(fd: int, text: str, within_s: float = 20.0) -> str:
    """What a terminal got, up to and with `text`; all of it when that does not come."""
    deadline = time.monotonic() + within_s
    got = ""
    while text not in got and select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            got += os.read(fd, 4096).decode(errors="replace")
        except OSError:
            break
    return got[: got.find(text) + len(text)] if text in got else got


def test_a_token_is_made_listed_used_and_revoked(node: Node, s3: S3Server):
    service = Service(node, FOREBAY_API__ANONYMOUS="false").start("stager", "api")
    secret = forebay("token", "create", "--name", "ci", "--scope", "read", "--expires", "1h").stdout.strip()
    assert re.fullmatch(r"fb_[\w-]+", secret)
    kept = [path.read_bytes() for path in node.settings.home.rglob("*") if path.is_file()]
    assert kept and not any(secret.encode() in data for data in kept)
    (listed,) = json.loads(forebay("token", "ls", "--json").stdout)
    assert (listed["name"], listed["scopes"]) == ("ci", ["read"]) and secret not in json.dumps(listed)
    assert "ci" in forebay("token", "ls").stdout
    node.set(FOREBAY_API_TOKEN=secret)
    assert json.loads(forebay("--api", service.url, "ls", "--json").stdout) == []
    assert "read" in refused("--api", service.url, "evict", "x")
    assert json.loads(forebay("token", "revoke", "ci", "--dry-run", "--json").stdout)["revoked"] == 1
    assert forebay("--api", service.url, "ls").returncode == 0
    assert "1 revoked" in forebay("token", "revoke", "ci").stdout
    assert "token" in refused("--api", service.url, "ls")
    assert "no token" in refused("token", "revoke", "ci")
    assert "scope" in refused("token", "create", "--name", "x", "--scope", "everything")


def test_another_node_is_asked_by_url(service: Service, make_dataset: MakeDataset):
    """With no daemon here: the URL leads, as an option or a variable."""
    url = make_dataset([5] * 2, 2000)
    job = json.loads(forebay("--api", service.url, "stage", url, "--wait", "--json").stdout)
    assert job["state"] == "done"
    service.node.set(FOREBAY_HOME=str(service.node.home / "elsewhere"))
    assert "nobody answers" in refused("ls")
    service.node.set(FOREBAY_API_URL=service.url)
    assert len(json.loads(forebay("ls", "--json").stdout)) == 1
    assert "127.0.0.1:1" in refused("--api", "http://127.0.0.1:1", "ls")
    assert "ftp://x" in refused("--api", "ftp://x", "ls")


def test_debug_shows_where(node: Node):
    assert "Traceback" not in refused("ls")
    run = forebay("--debug", "ls", check=False)
    assert run.returncode == 1 and "Traceback" in run.stderr and "DaemonUnavailable" in run.stderr


def test_a_step_is_removed_and_the_newest_is_not(node: Node, s3: S3Server):
    Service(node, FOREBAY_CHECKPOINT__KEEP_LOCAL="5").start()
    save("run", 1, 2, 3)
    rm = ("checkpoints", "rm", "run")
    assert "newest" in refused(*rm, "3") and "no checkpoint" in refused(*rm, "9")
    forebay("checkpoints", "pin", "run", "2")
    assert "pin" in refused(*rm, "2")
    assert "1 would go" in forebay(*rm, "1", "--dry-run").stdout

    def steps() -> list[int]:
        return [found["step"] for found in json.loads(forebay("checkpoints", "ls", "run", "--json").stdout)]

    assert steps() == [3, 2, 1]
    assert [gone["step"] for gone in json.loads(forebay(*rm, "1", "--json").stdout)] == [1]
    assert steps() == [3, 2]


def test_evict_says_what_it_would_do(service: Service, make_dataset: MakeDataset):
    forebay("stage", make_dataset([5] * 3, 2000), "--wait")
    (dataset,) = json.loads(forebay("ls", "--json").stdout)
    evict = ("evict", dataset["name"], "--json")
    assert json.loads(forebay(*evict, "--dry-run").stdout)["shards"] == 3
    assert json.loads(forebay("ls", "--json").stdout)[0]["staged_shards"] == 3
    assert json.loads(forebay(*evict, "--glob", "shard-000*").stdout)["shards"] == 1
    assert json.loads(forebay(*evict, "--dry-run").stdout)["shards"] == 2
    assert "no dataset" in refused("evict", "unknown").lower()


def test_doctor_tells_programs_too(node: Node, s3: S3Server):
    doctor = ("doctor", "--quick", "--json")
    found = json.loads(forebay(*doctor, "--source", s3.url(""), check=False).stdout)
    assert {"check", "level", "what", "why", "fix"} == set(found[0])
    assert not any(f["level"] == "fail" and f["check"] == "source" for f in found)
    run = forebay(*doctor, "--source", "http://127.0.0.1:1/x", check=False)
    failed = [f for f in json.loads(run.stdout) if f["level"] == "fail" and f["check"] == "source"]
    assert run.returncode == 1 and failed and failed[0]["fix"]
    assert (
        "127.0.0.1:1" in forebay("doctor", "--quick", "--source", "http://127.0.0.1:1/x", check=False).stdout
    )


def test_a_topology_file_is_written_and_agrees(node: Node, tmp_path: Path):
    run = forebay("nccl-topo")
    file = tmp_path / "topo.xml"
    file.write_text(run.stdout)
    assert "NCCL_TOPO_FILE" in run.stderr
    assert "agrees" in forebay("nccl-topo", str(file)).stdout
    file.write_text(run.stdout.replace("<system", "<machine").replace("</system", "</machine"))
    wrong = forebay("nccl-topo", str(file), "--json", check=False)
    assert wrong.returncode == 1 and json.loads(wrong.stdout)["disagreements"]
    assert "none.xml" in forebay("nccl-topo", str(tmp_path / "none.xml"), check=False).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete(node: Node, shell: str):
    """As the script that `--install-completion` writes asks."""
    words = {"COMP_WORDS": "forebay chec", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "forebay chec"}
    node.set(_FOREBAY_COMPLETE=f"complete_{shell}", _TYPER_COMPLETE_FISH_ACTION="get-args", **words)
    assert "checkpoints" in forebay(check=False).stdout
