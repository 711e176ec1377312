"""Who asks, what they may name, and what nobody gets to see."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.api.auth.principal import ANONYMOUS, OWNER, SCOPES, Principal, scopes_of
from forebay.api.auth.sources import check_source, may_see_run
from forebay.api.auth.tokens import TokenBook
from forebay.core.config import ApiSettings, Settings, TenantSettings
from forebay.core.errors import Forbidden, ForebayError, InvalidRequest, NotFound, Unauthorized
from forebay.core.redact import redact_all, redacted

WORD = st.text("abcXYZ019-_.~+", min_size=8, max_size=40)


@pytest.fixture
def book(tmp_path: Path) -> TokenBook:
    return TokenBook(tmp_path)


def test_a_token_is_known_by_its_digest_alone(book: TokenBook, tmp_path: Path):
    token, secret = book.create("ci", ["stage"], "team-a")
    who = book.check(secret)
    assert (who.name, who.tenant, who.scopes) == ("ci", "team-a", {"read", "stage"})
    assert not who.local
    kept = b"".join(path.read_bytes() for path in (tmp_path / "api").iterdir())
    assert secret.encode() not in kept and secret.rpartition("_")[2].encode() not in kept
    assert token.id.encode() in kept
    assert os.stat(tmp_path / "api/tokens.db").st_mode & 0o077 == 0


def test_revoked_expired_and_altered_tokens_are_refused(book: TokenBook, monkeypatch: pytest.MonkeyPatch):
    _, secret = book.create("ci", ["admin"], ttl_s=60)
    book.check(secret)
    for wrong in (secret[:-1] + ("A" if secret[-1] != "A" else "B"), "fb_", "", "x" * 5000, secret + "x"):
        with pytest.raises(Unauthorized, match="not known"):
            book.check(wrong)
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 61)
        with pytest.raises(Unauthorized, match="expired"):
            book.check(secret)
    assert book.revoke("ci") == 1
    with pytest.raises(Unauthorized):
        book.check(secret)
    with pytest.raises(NotFound):
        book.revoke("ci")


def test_a_second_process_sees_what_the_first_one_did(book: TokenBook, tmp_path: Path):
    other = TokenBook(tmp_path)
    token, secret = book.create("me", ["read"])
    assert other.check(secret).name == "me"
    other.revoke(token.id)
    with pytest.raises(Unauthorized):
        book.check(secret)


@pytest.mark.parametrize(
    ("name", "scopes", "ttl_s"),
    [
        ("", ["read"], None),
        ("../x", ["read"], None),
        ("a", [], None),
        ("a", ["root"], None),
        ("a", ["read"], -1),
    ],
)
def test_tokens_that_make_no_sense(book: TokenBook, name: str, scopes: list[str], ttl_s: float | None):
    with pytest.raises(InvalidRequest):
        book.create(name, scopes, ttl_s=ttl_s)
    assert book.all() == []


def test_scopes_hold_the_ones_before_them():
    assert [sorted(scopes_of([scope])) for scope in SCOPES] == [
        ["read"], ["read", "stage"], ["admin", "read", "stage"],
    ]  # fmt: skip
    reader = Principal("r", scopes_of(["read"]))
    reader.require("read")
    with pytest.raises(Forbidden, match="needs the scope 'stage'"):
        reader.require("stage")


SETTINGS = Settings.model_construct(
    api=ApiSettings(sources=("s3://", "gs://pub/open", "https://data.example.org/sets")),  # type: ignore[call-arg]
    tenant=(TenantSettings(name="a", sources=("s3://team-a/",), runs=("a-*",)),),
)
TENANT = Principal("t", frozenset(SCOPES), "a")
STRANGER = Principal("s", frozenset(SCOPES), "unlisted")


@pytest.mark.parametrize(
    ("who", "url"),
    [
        (ANONYMOUS, "s3://any/thing"),
        (ANONYMOUS, "S3://any"),
        (ANONYMOUS, "gs://pub/open"),
        (ANONYMOUS, "gs://pub/open/x/y"),
        (TENANT, "s3://team-a/train"),
        (TENANT, "s3://team-a"),
        (OWNER, "/mnt/nas/train"),
        (OWNER, "file:///mnt/nas/train"),
    ],
)
def test_what_is_listed_may_be_read(who: Principal, url: str):
    check_source(url, who, SETTINGS)


@pytest.mark.parametrize(
    ("who", "url"),
    [
        (ANONYMOUS, "gs://pub/opened"),
        (ANONYMOUS, "gs://pub/other"),
        (ANONYMOUS, "file:///etc/passwd"),
        (ANONYMOUS, "FILE:///etc"),
        (ANONYMOUS, "/etc/passwd"),
        (ANONYMOUS, "etc"),
        (ANONYMOUS, "http://169.254.169.254/latest/meta-data"),
        (ANONYMOUS, "http://localhost:8370/v1"),
        (ANONYMOUS, "ftp://x/y"),
        (ANONYMOUS, "simplecache::file:///etc"),
        (ANONYMOUS, "s3://b/../../etc"),
        (ANONYMOUS, "s3://b/%2e%2e/etc"),
        (ANONYMOUS, "s3://b/%252e%252e/etc"),
        (ANONYMOUS, "s3://b/x\\..\\y"),
        (ANONYMOUS, "s3://b/%5c..%5cy"),
        (ANONYMOUS, "s3://b/x\r\nHost: y"),
        (ANONYMOUS, "s3://b/x\0y"),
        (ANONYMOUS, "s3://key:secret@b/x"),
        (OWNER, "https://user:secret@host/x"),
        (TENANT, "s3://team-b/train"),
        (TENANT, "s3://team-abc/train"),
        (TENANT, "s3://team-a@evil/train"),
        (TENANT, "gs://pub/open"),
        (STRANGER, "s3://team-a/train"),
    ],
)
def test_everything_else_is_not(who: Principal, url: str):
    with pytest.raises((Forbidden, InvalidRequest)) as refusal:
        check_source(url, who, SETTINGS)
    assert "secret" not in str(refusal.value)


def test_a_listed_host_that_leads_to_the_metadata_service_is_refused(monkeypatch: pytest.MonkeyPatch):
    url = "https://data.example.org/sets/a"
    for address in ("169.254.169.254", "::ffff:169.254.169.254", "fd00:ec2::254", "fe80::1%eth0"):
        family = 10 if ":" in address else 2
        monkeypatch.setattr(
            "socket.getaddrinfo", lambda *a, f=family, at=address, **k: [(f, 1, 6, "", (at, 443))]
        )
        with pytest.raises(Forbidden):
            check_source(url, ANONYMOUS, SETTINGS)
    monkeypatch.setattr("socket.getaddrinfo", lambda *a, **k: [(2, 1, 6, "", ("93.184.216.34", 443))])
    check_source(url, ANONYMOUS, SETTINGS)


def test_a_link_does_not_lead_out_of_a_listed_folder(tmp_path: Path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside / "real", outside):
        folder.mkdir(parents=True)
    (inside / "link").symlink_to(outside)
    (inside / "near").symlink_to(inside / "real")
    listed = Settings.model_construct(api=ApiSettings(sources=(f"file://{inside}",)), tenant=())  # type: ignore[call-arg]
    check_source(f"file://{inside}/real", ANONYMOUS, listed)
    check_source(f"file://{inside}/near", ANONYMOUS, listed)
    for url in (
        f"file://{inside}/link",
        f"file://{outside}",
        f"file://{inside}-more",
        f"file://host{inside}",
    ):
        with pytest.raises(ForebayError):
            check_source(url, ANONYMOUS, listed)


def test_runs_of_a_tenant():
    assert may_see_run("a-1", TENANT, SETTINGS) and may_see_run("b-1", OWNER, SETTINGS)
    assert not may_see_run("b-1", TENANT, SETTINGS) and not may_see_run("a-1", STRANGER, SETTINGS)


@given(
    user=WORD,
    secret=WORD,
    key=st.sampled_from(["X-Amz-Signature", "sig", "token", "X-Amz-Security-Token", "api_key"]),
)
def test_no_secret_survives_redaction(user: str, secret: str, key: str):
    secret = f"Z{secret}Z"
    for text in (
        f"redis://{user}:{secret}@host:6379/0 fails",
        f"redis://:{secret}@host",
        f"GET https://host/x?a=1&{key}={secret}&b=2 gave 403",
        f"Authorization: Bearer {secret}",
        f"token fb_0123456789ab_{secret}",
    ):
        assert secret not in redacted(text), text
        assert secret not in str(redact_all({"a": [text, {"b": text}], "n": 3}))


def test_redaction_leaves_the_rest_alone():
    for text in ("s3://bucket/a@b/c", "http://host:80/x?limit=3", "user@example.org", "12 tokens", ""):
        assert redacted(text) == text
    assert redact_all({"a": 1, "b": None, "c": 1.5}) == {"a": 1, "b": None, "c": 1.5}
