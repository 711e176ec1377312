"""What a person types and a program sends: the command line, REST, `forebay up`, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import obstore
import pytest
import torch

from forebay.benchmarks.seaweed import S3Server, free_ports
from forebay.checkpointd import Checkpointer
from tests.conftest import Node, eventually, shard_bytes
from tests.integration.cli import forebay, refused

MakeDataset = Callable[[list[int], int], str]


@pytest.fixture
def up(node: Node, s3: S3Server) -> Iterator[tuple[Node, subprocess.Popen[bytes], str]]:
    """`forebay up` as a user starts it, and the URL of its API."""
    port = str(free_ports(1)[0])
    node.set(FOREBAY_API__PORT=port)
    with (node.home / "up.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "forebay.api.cli", "up"], stderr=log)
    try:
        assert eventually(lambda: "forebay is up" in (node.home / "up.log").read_text(), 30)
        yield node, process, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=20)


Up = tuple[Node, subprocess.Popen[bytes], str]


def test_stage_status_ls_and_checkpoints(up: Up, make_dataset: MakeDataset, s3: S3Server, prefix: str):
    url = make_dataset([5, 5, 5], 2000)
    job = json.loads(forebay("stage", url, "--wait", "--json").stdout)
    assert (job["state"], job["shards_done"], job["failed"]) == ("done", 3, {})
    assert "3/3" in forebay("ls").stdout
    (dataset,) = json.loads(forebay("ls", "--json").stdout)
    assert dataset["staged_bytes"] == dataset["size_bytes"] == job["bytes_done"]
    status = json.loads(forebay("status", "--json").stdout)
    assert status["stager"]["shards"] == 3 and status["checkpoint"]["attempts"] == []
    again = json.loads(forebay("stage", dataset["name"], "--wait", "--json").stdout)
    assert (
        again["state"] == "done" and json.loads(forebay("status", "--json").stdout)["stager"]["fetches"] == 3
    )

    upstream = s3.url(f"{prefix}-ckpt")
    Checkpointer("run", upstream=upstream).save(7, {"w": torch.ones(10)}).wait()
    assert " 7 " in forebay("checkpoints", "ls", "run").stdout
    (found,) = json.loads(forebay("checkpoints", "ls", "run", "--upstream", upstream, "--json").stdout)
    assert (found["step"], found["tiers"]) == (7, ["spool", "upstream"])
    assert "ok" in forebay("checkpoints", "verify", "run", "--upstream", upstream).stdout
    (file,) = (up[0].settings.spool_dir / "runs").rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    run = forebay("checkpoints", "verify", "run", check=False)
    assert run.returncode == 1 and "does not match its digest" in run.stdout


def test_a_partial_stage_job_fails_and_lists_what_failed(
    up: Up, make_dataset: MakeDataset, s3: S3Server, prefix: str
):
    """F29: done means every byte verified; anything less is exit status 1 with the keys."""
    url = make_dataset([5, 5, 5], 2000)
    with httpx.Client(base_url=up[2]) as api:
        dataset = api.post("/v1/datasets", json={"url": url}).raise_for_status().json()
    obstore.delete(s3.store(), f"{prefix}/shard-001.tar")
    run = forebay("stage", dataset["name"], "--wait", "--json", check=False)
    job = json.loads(run.stdout)
    assert run.returncode == 1 and job["state"] == "partial" and job["shards_done"] == 2
    assert list(job["failed"]) == ["shard-001.tar"] and "is not there" in job["failed"]["shard-001.tar"]


def test_rest_does_the_same(up: Up, make_dataset: MakeDataset, s3: S3Server, prefix: str):
    url = make_dataset([5, 5], 2000)
    with httpx.Client(base_url=up[2], timeout=30) as api:
        assert api.get("/healthz").json() == {"status": "ok"}
        assert api.get("/readyz").json() == {"status": "ready"}
        created = api.post("/v1/datasets", json={"url": url, "name": "digits"})
        assert created.status_code == 201 and created.json()["shards"] == 2
        started = api.post("/v1/stage-jobs", json={"dataset": "digits"})
        assert started.status_code == 202
        job = f"/v1/stage-jobs/{started.json()['id']}"
        assert eventually(lambda: api.get(job).json()["state"] == "done")
        assert api.get("/v1/datasets/digits").json()["staged_shards"] == 2
        assert len(api.get("/v1/stage-jobs").json()["items"]) == 1
        assert len(api.get("/v1/datasets").json()["items"]) == 1
        hot = api.get("/v1/tiers").json()["hot"]
        assert hot["shards"] == 2 and 0 < hot["held_bytes"] <= hot["capacity_bytes"]
        Checkpointer("run").save(1, {"w": torch.ones(10)}).wait()
        assert api.get("/v1/runs/run/checkpoints").json()["items"][0]["step"] == 1
        metrics = api.get("/metrics").text
        assert (
            "forebay_stager_fetches_total 2.0" in metrics
            and "forebay_checkpoint_commits_total 1.0" in metrics
        )
        paths = api.get("/openapi.json").json()["paths"]
        assert {"/v1/datasets", "/v1/stage-jobs", "/v1/tiers", "/v1/runs/{run}/checkpoints"} <= set(paths)


def test_rest_errors_are_problem_details(up: Up):
    """RFC 9457."""
    with httpx.Client(base_url=up[2], timeout=30) as api:
        for reply, status, code in [
            (api.get("/v1/datasets/none"), 404, "dataset_not_found"),
            (api.get("/v1/stage-jobs/none"), 404, "not_found"),
            (api.post("/v1/datasets", json={"url": "s3://no-such-bucket/x"}), 404, "bucket_not_found"),
            (api.post("/v1/datasets", json={"uri": "s3://b"}), 422, "invalid_request"),
            (api.get("/v1/runs/..evil/checkpoints"), 422, "invalid_request"),
        ]:
            body = reply.json()
            assert (reply.status_code, body["title"], body["status"]) == (status, code, status), body
            assert reply.headers["content-type"] == "application/problem+json" and body["detail"]


def test_a_daemon_that_dies_is_started_again(up: Up, make_dataset: MakeDataset):
    node = up[0]
    first = json.loads(forebay("status", "--json").stdout)
    for part in ("stager", "checkpoint"):
        os.kill(first[part]["pid"], signal.SIGKILL)
    assert eventually(lambda: forebay("status", "--json", check=False).returncode == 0, 20)
    second = json.loads(forebay("status", "--json").stdout)
    assert second["stager"]["pid"] != first["stager"]["pid"]
    assert "starting it again" in (node.home / "up.log").read_text()


def test_kill_9_of_up_ends_its_daemons_and_it_can_start_at_once(up: Up):
    """F3."""
    node, process, _ = up
    pids = [json.loads(forebay("status", "--json").stdout)[part]["pid"] for part in ("stager", "checkpoint")]
    process.kill()
    process.wait()
    assert eventually(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))
    node.start("stager")
    node.start("checkpoint")
    forebay("status")


@pytest.fixture
def stagerd(node: Node, s3: S3Server) -> Node:
    node.start()
    return node


def test_a_socket_nobody_listens_on(node: Node):
    for command in (("ls",), ("stage", "s3://forebay/x"), ("checkpoints", "ls")):
        line = refused(*command)
        assert "nobody answers on" in line and "forebay up" in line
    run = forebay("status", "--json", check=False)
    assert run.returncode == 1 and json.loads(run.stdout) == {"stager": None, "checkpoint": None}


def test_an_unknown_setting(node: Node):
    config = node.home / "forebay.toml"
    config.write_text("[stager]\ncapasity = '1GB'\n")
    node.set(FOREBAY_CONFIG=str(config))
    for command in (("config", "check"), ("serve", "stager"), ("ls",)):
        assert "unknown key `stager.capasity`" in refused(*command)
    config.write_text("[stager]\ncapacity = '1GB'\n")
    assert forebay("config", "check").stdout == "ok\n"
    assert json.loads(forebay("config", "show", "--json").stdout)["stager"]["capacity"] == 10**9


def test_no_server_at_the_url(stagerd: Node):
    stagerd.kill()
    stagerd.set(AWS_ENDPOINT_URL=f"http://127.0.0.1:{free_ports(1)[0]}")
    stagerd.start()
    line = refused("stage", "s3://forebay/x")
    assert "no answer from http://127.0.0.1" in line and "AWS_ENDPOINT_URL" in line


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials(stagerd: Node, wrong: str):
    stagerd.kill()
    stagerd.set(**{wrong: "wrong"})
    stagerd.start()
    line = refused("stage", "s3://forebay/x")
    assert "s3://forebay/x" in line and "AWS_ACCESS_KEY_ID" in line


def test_empty_prefix_and_missing_bucket_and_odd_urls(stagerd: Node, s3: S3Server):
    assert "there is nothing under s3://forebay/nothing" in refused("stage", "s3://forebay/nothing")
    assert "there is no such bucket" in refused("stage", "s3://no-such-bucket/x")
    assert "is not a directory" in refused("stage", "/no/such/directory")
    assert "Protocol not known" in refused("stage", "nonsense://x/y")
    assert "names no bucket" in refused("stage", "s3:///x")
    assert "unknown format" in refused("stage", "s3://forebay/x", "--format", "zip")
    assert "no dataset 'unknown' is registered" in refused("stage", "unknown")
    obstore.put(s3.store(), "only-text/readme.txt", b"hello")
    line = refused("stage", s3.url("only-text"), "--format", "webdataset")
    assert "holds 1 objects, but none is named like a shard of format 'webdataset'" in line


LOAD = """
import sys
from forebay.loaders import DataLoader, StagedDataset
try:
    for batch in DataLoader(StagedDataset(sys.argv[1], fields=("bin",)), 2):
        pass
except Exception as err:
    print(type(err).__name__, err)
"""


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"this is no tar" * 100, "FormatError s3://forebay/{0}/shard.tar is not a tar file"),
        (shard_bytes(0, 5, 3000)[:9000], "TruncatedShard s3://forebay/{0}/shard.tar is cut off"),
        (b"", "FormatError s3://forebay/{0}/shard.tar is not a tar file"),
    ],
)
def test_a_bad_shard_ends_training_with_its_name(
    stagerd: Node, s3: S3Server, prefix: str, data: bytes, says: str
):
    obstore.put(s3.store(), f"{prefix}/shard.tar", data, use_multipart=False)
    run = subprocess.run(
        [sys.executable, "-c", LOAD, s3.url(prefix)], capture_output=True, text=True, check=False, timeout=30
    )
    assert run.stdout.startswith(says.format(prefix)), run.stdout + run.stderr


def test_capacity_smaller_than_one_shard(stagerd: Node, make_dataset: MakeDataset):
    stagerd.kill()
    stagerd.set(FOREBAY_STAGER__CAPACITY="10KB")
    stagerd.start()
    url = make_dataset([5], 5000)
    line = refused("stage", url)
    assert "hot tier holds 9.8KiB" in line and "stager.capacity" in line
    run = subprocess.run(
        [sys.executable, "-c", LOAD, url], capture_output=True, text=True, check=False, timeout=30
    )
    assert "stager.capacity" in run.stdout


def test_misuse_is_exit_status_2(node: Node):
    for command in (("serve", "nonsense"), ("stage",), ("nonsense",)):
        assert forebay(*command, check=False).returncode == 2


def test_an_api_beyond_loopback_is_refused(node: Node):
    node.set(FOREBAY_API__HOST="0.0.0.0")
    assert "loopback only" in refused("serve", "api")


def test_version_and_help_name_every_command(node: Node):
    text: Any = forebay("--help").stdout
    for command in ("up", "serve", "stage", "status", "ls", "checkpoints", "bench", "demo", "config"):
        assert f" {command} " in text
    assert forebay("--version").stdout.strip()
