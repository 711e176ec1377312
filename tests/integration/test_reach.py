"""Many sessions, odd names, mixed sizes, credentials that run out."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import obstore
import pytest

from forebay.benchmarks.seaweed import S3Server
from forebay.core.errors import ForebayError, InvalidRequest
from forebay.core.protocol import DatasetReply, Done, OpenPlan, Register
from forebay.tiers.credentials import credential_provider
from forebay.tiers.store import check_key
from tests.conftest import Node, eventually, shard_bytes
from tests.integration.test_stager import MakeDataset, read_shard, register, stage

KB = 1000


def test_two_hundred_sessions_with_plans_at_once(node: Node, make_dataset: MakeDataset):
    """One fetch for each shard, everybody has the right bytes, and all is free afterwards (S5, S7)."""
    url = make_dataset([2] * 10, KB)
    node.start()
    with ExitStack() as stack:
        channels = [stack.enter_context(node.connect()) for _ in range(200)]
        dataset = register(channels[0], url)
        for channel in channels:
            channel.request(OpenPlan(dataset.id, list(range(10)), 2), expect=Done)
        for number, channel in enumerate(channels):
            assert read_shard(channel, dataset, number % 10) == shard_bytes(number % 10, 2, KB)
        status = node.stager()
        assert status.sessions >= 200 and status.fetches == 10 and status.leased_bytes > 0
    assert eventually(lambda: node.stager().sessions == 1 and node.stager().leased_bytes == 0)


def test_a_large_shard_between_small_ones_comes_whole(node: Node, s3: S3Server, prefix: str):
    """Small ones share a turn; a large one never joins it."""
    sizes = [2 * KB, 3 * KB, 700 * KB, 1 * KB, 2 * KB, 650 * KB] * 3
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    for number, body in enumerate(bodies):
        obstore.put(s3.store(), f"{prefix}/{number:02d}", body, use_multipart=False)
    node.set(FOREBAY_TRANSFER__WHOLE_BYTES="300KB", FOREBAY_TRANSFER__RANGE_BYTES="100KB")
    node.start()
    with node.connect() as channel:
        dataset = register(channel, s3.url(prefix), "raw")
        for number in (0, 7):
            read_shard(channel, dataset, number)
        job = stage(channel, dataset)
        assert (job.state, job.shards_done) == ("done", len(sizes))
        assert [read_shard(channel, dataset, n) for n in range(len(sizes))] == bodies


@pytest.mark.parametrize("key", ["a\0b", "../x", "a/../b", "/a", "", "a/./b"])
def test_names_that_lead_out_of_a_store_are_refused(key: str):
    with pytest.raises(InvalidRequest):
        check_key(key)


def test_names_longer_than_a_file_system_holds_are_staged(node: Node, s3: S3Server, prefix: str):
    """A staged file's name is its id: a key may be as long as S3 lets it (1024 bytes)."""
    # Parts of 250 bytes: the server under test keeps keys as paths.
    names = ["/".join(["n" * 250] * 3), "ü" * 120 + "/ " + "x" * 240]
    for name in names:
        obstore.put(s3.store(), f"{prefix}/{name}", name.encode(), use_multipart=False)
    node.start()
    with node.connect() as channel:
        dataset = register(channel, s3.url(prefix), "raw")
        found = {read_shard(channel, dataset, shard).decode() for shard in range(dataset.shards)}
        assert found == set(names)


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "ftp-what://x/y", "s3://forebay/\0"])
def test_urls_that_cannot_be_are_errors(node: Node, s3: S3Server, url: str):
    node.start()
    with node.connect() as channel, pytest.raises(ForebayError):
        channel.request(Register(url, "raw"), expect=DatasetReply)
    assert node.stager().sessions == 1


class Issuer:
    """A `credential_process` of an AWS profile: each call gives the server's keys for a while."""

    def __init__(self, folder: Path, s3: S3Server, lasting: timedelta) -> None:
        self._calls = folder / "calls"
        answer = {
            "Version": 1,
            "AccessKeyId": s3.access_key,
            "SecretAccessKey": s3.secret_key,
            "SessionToken": "",
            "Expiration": (datetime.now(UTC) + lasting).isoformat(),
        }
        (folder / "answer").write_bytes(msgspec.json.encode(answer))
        script = folder / "issue.py"
        script.write_text(
            f"open({str(self._calls)!r}, 'a').write('x')\nprint(open({str(folder / 'answer')!r}).read())\n"
        )
        self.config = folder / "config"
        self.config.write_text(f"[profile lab]\ncredential_process = {sys.executable} {script}\n")

    @property
    def calls(self) -> int:
        return len(self._calls.read_text()) if self._calls.exists() else 0


def without_keys(monkeypatch: pytest.MonkeyPatch, issuer: Issuer) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(issuer.config))
    monkeypatch.setenv("AWS_PROFILE", "lab")


def test_credentials_of_a_profile_let_a_dataset_in(
    node: Node, s3: S3Server, make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url = make_dataset([3], KB)
    issuer = Issuer(tmp_path, s3, timedelta(hours=1))
    without_keys(monkeypatch, issuer)
    node.start()
    with node.connect() as channel:
        assert read_shard(channel, register(channel, url), 0) == shard_bytes(0, 3, KB)
    assert issuer.calls == 1


@pytest.mark.parametrize(("lasting", "anew"), [(timedelta(minutes=2), True), (timedelta(hours=1), False)])
def test_credentials_near_their_end_are_asked_for_anew(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: timedelta, anew: bool
):
    issuer = Issuer(tmp_path, s3, lasting)
    without_keys(monkeypatch, issuer)
    provide = credential_provider(None)
    assert provide is not None
    for _ in range(3):
        assert provide()["access_key_id"] == s3.access_key
    assert issuer.calls >= 3 if anew else issuer.calls == 1
