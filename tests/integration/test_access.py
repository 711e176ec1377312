"""Who may do what over REST: scopes as a matrix, tenants, tokens of a provider, certificates, groups."""

from __future__ import annotations

import grp
import json
import os
import pwd
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import rsa

from forebay.api.auth.tokens import TokenBook
from forebay.api.client import Client
from forebay.benchmarks.seaweed import S3Server
from forebay.core.errors import (
    ConfigError,
    DaemonUnavailable,
    DatasetNotFound,
    Forbidden,
    ForebayError,
    Unauthorized,
)
from tests.conftest import Node
from tests.integration.api import Service, own_node, problem
from tests.integration.cli import forebay

MakeDataset = Callable[[list[int], int], str]
OPEN = {"/healthz", "/readyz"}
ADMIN = {("post", "/v1/datasets/{dataset}/evict"), ("delete", "/v1/runs/{run}/checkpoints/{step}")}


@pytest.fixture(scope="module")
def guarded(s3: S3Server) -> Iterator[Service]:
    tenants = [{"name": "a", "sources": ["s3://forebay/"], "runs": ["a-*"]}, {"name": "b"}]
    with own_node() as node:
        yield Service(node, FOREBAY_API__ANONYMOUS="false", FOREBAY_TENANT=json.dumps(tenants)).start()


def test_every_route_asks_for_its_scope(guarded: Service):
    scopes = ["read", "stage", "admin"]
    tokens = {scope: guarded.token(scope, name=f"only-{scope}") for scope in scopes}
    with guarded.http(tokens["read"]) as http:
        paths: dict[str, dict[str, Any]] = http.get("/openapi.json").json()["paths"]
    asked = 0
    for path, methods in paths.items():
        for method in methods:
            needs = "admin" if (method, path) in ADMIN else "read" if method == "get" else "stage"
            url = path.replace("{step}", "1").replace("{", "").replace("}", "")
            with guarded.http() as http:
                reply = http.request(method, url)
                if path in OPEN:
                    assert reply.is_success
                    continue
                assert problem(reply) == (401, "unauthorized"), (method, path)
                assert reply.headers["www-authenticate"].startswith("Bearer")
            for scope in scopes:
                with guarded.http(tokens[scope]) as http:
                    status = http.request(method, url).status_code
                    enough = scopes.index(scope) >= scopes.index(needs)
                    assert (status not in (401, 403)) is enough, (method, path, scope, status)
                    asked += 1
    assert asked > 80


def test_what_is_no_token(guarded: Service):
    for value in ("Bearer", "Bearer x", "Basic abcd", "Bearer fb_0123456789ab_" + "x" * 43, "fb_x"):
        with httpx.Client(base_url=guarded.url, headers={"Authorization": value}) as http:
            assert problem(http.get("/v1/tiers")) == (401, "unauthorized"), value


def test_a_revoked_token_ends_at_once(guarded: Service):
    token = guarded.token("read", name="gone")
    with guarded.http(token) as http:
        assert http.get("/v1/tiers").is_success
        TokenBook(guarded.node.settings.home).revoke("gone")
        assert problem(http.get("/v1/tiers")) == (401, "unauthorized")
    assert token not in guarded.node.log("api")


def test_tenants_see_their_own_only(guarded: Service, make_dataset: MakeDataset):
    url = make_dataset([1] * 2, 10)
    a = guarded.client(guarded.token("stage", tenant="a", name="of-a"))
    b = guarded.client(guarded.token("admin", tenant="b", name="of-b"))
    root = guarded.client(guarded.token("admin", name="root"))
    with a, b, root:
        dataset = a.register(url, name="mine")
        job = a.wait(a.stage("mine"))
        pin = a.pin("mine")
        assert (dataset.tenant, job.tenant, job.owner) == ("a", "a", "of-a")
        assert b.datasets().items == [] and b.jobs().items == [] and b.pins().items == []
        for ask in (
            lambda: b.dataset(dataset.id),
            lambda: b.shards(dataset.id),
            lambda: b.stage(dataset.id),
            lambda: b.evict("mine"),
            lambda: b.job(job.id),
            lambda: b.cancel(job.id),
            lambda: b.unpin(pin.id),
        ):
            with pytest.raises(ForebayError) as refusal:
                ask()
            assert refusal.value.status == 404
        with pytest.raises(Forbidden):
            b.register(url)
        with pytest.raises(Forbidden):
            a.register(url, tenant="b")
        assert root.register(url, name="mine", tenant="b").tenant == "b"
        assert b.dataset("mine").id != a.dataset("mine").id, "one name, two tenants"
        assert a.problems().items == [] and a.overview().jobs[0].id == job.id and b.overview().jobs == []
        with pytest.raises(ForebayError, match="no run"):
            b.checkpoints("a-1")


def test_keys_are_the_callers_own(guarded: Service, make_dataset: MakeDataset):
    url = make_dataset([1], 10)
    one, two = (guarded.client(guarded.token("stage", name=name)) for name in ("k1", "k2"))
    with one, two:
        one.register(url, name="keyed")
        assert one.pin("keyed", key="x").id == one.pin("keyed", key="x").id != two.pin("keyed", key="x").id


def test_the_owner_needs_no_token_on_the_socket(guarded: Service):
    with Client(f"unix://{guarded.node.settings.api_socket}") as client:
        assert client.tiers().node


@contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    """Who connects meanwhile is this user (SO_PEERCRED has the ids of that moment)."""
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_group_may_use_the_socket_within_its_scopes(node: Node):
    nobody = pwd.getpwnam("nobody")
    group = next(found for found in grp.getgrall() if found.gr_gid not in (0, nobody.pw_gid))
    variables = {"FOREBAY_API__GROUP": group.gr_name, "FOREBAY_API__GROUP_SCOPES": '["read"]'}
    Service(node, **variables).start("stager", "api")
    node.home.chmod(0o711)
    path = node.settings.api_socket
    with acting_as(nobody.pw_uid, group.gr_gid), Client(f"unix://{path}") as client:
        assert client.tiers().node
        with pytest.raises(Forbidden, match=f"uid:{nobody.pw_uid} may read"):
            client.pin("x")
    stranger = (nobody.pw_uid, nobody.pw_gid)
    denied = pytest.raises(DaemonUnavailable, match="Permission denied")
    with acting_as(*stranger), Client(f"unix://{path}") as client, denied:
        client.tiers()
    path.chmod(0o666)
    refused = pytest.raises(Forbidden, match="may not use this socket")
    with acting_as(*stranger), Client(f"unix://{path}") as client, refused:
        client.tiers()


def test_another_site_cannot_send_through_the_viewers_browser(node: Node):
    service = Service(node, FOREBAY_API__ANONYMOUS="true").start("api")
    with service.http() as http:
        assert problem(http.get("/v1/node", headers={"Host": "evil.example"})) == (403, "forbidden")
        for origin in ("http://evil.example", "null", f"{service.url}0"):
            reply = http.post("/v1/pins", json={"dataset": "x"}, headers={"Origin": origin})
            assert problem(reply) == (403, "forbidden")
        assert (
            http.post("/v1/pins", json={"dataset": "x"}, headers={"Origin": service.url}).status_code == 503
        )


class Issuer:
    """An OpenID provider as far as its keys go."""

    def __init__(self) -> None:
        self.asked = 0
        self.keys: dict[str, rsa.RSAPrivateKey] = {}
        self.turn("k1")
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                body = json.dumps(issuer.document(self.path)).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def turn(self, kid: str) -> None:
        self.keys = {kid: rsa.generate_private_key(public_exponent=65537, key_size=2048)}

    def document(self, path: str) -> dict[str, Any]:
        if path.endswith("openid-configuration"):
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        found = [
            {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key())), "kid": kid, "use": "sig"}
            for kid, key in self.keys.items()
        ]
        return {"keys": found}

    def token(self, **claims: Any) -> str:
        ((kid, key),) = self.keys.items()
        now = int(time.time())
        said = {"iss": self.url, "aud": "forebay", "sub": "ada", "exp": now + 600, "roles": ["forebay-stage"]}
        return jwt.encode({**said, **claims}, key, "RS256", headers={"kid": kid})


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    found = Issuer()
    yield found
    found.server.shutdown()


def test_tokens_of_a_provider(node: Node, issuer: Issuer):
    oidc = {"issuer": issuer.url, "audience": "forebay", "tenant_claim": "org.team"}
    service = Service(node, FOREBAY_API__OIDC=json.dumps(oidc)).start("stager", "api")
    good = issuer.token(org={"team": "a"})
    with service.client(good) as client:
        assert client.tiers().node
        with pytest.raises(DatasetNotFound):
            client.stage("x")
        with pytest.raises(Forbidden, match="oidc:ada may read, stage"):
            client.evict("x")
    asked = issuer.asked
    for wrong in (
        issuer.token(org={"team": "a"}, exp=int(time.time()) - 60),
        issuer.token(org={"team": "a"}, aud="another"),
        issuer.token(org={"team": "a"}, iss="http://another"),
        issuer.token(),
        jwt.encode({"sub": "eve"}, "s" * 32, "HS256", headers={"kid": "k1"}),
        jwt.encode({"sub": "eve"}, "", "none"),
        good[:-4] + "AAAA",
    ):
        with service.client(wrong) as client, pytest.raises(Unauthorized):
            client.tiers()
    with service.client(issuer.token(org={"team": "a"}, roles=["other"])) as client, pytest.raises(Forbidden):
        client.tiers()
    assert issuer.asked == asked, "the keys are kept"
    issuer.server.shutdown()
    with service.client(good) as client:
        assert client.tiers().node, "an issuer that is away stops nobody whose key is known"


def certificate(ca: trustme.CA, folder: Path, name: str, **options: Any) -> Path:
    """Certificate and key in one file."""
    file = folder / f"{len(list(folder.iterdir()))}.pem"
    made = ca.issue_cert("127.0.0.1", f"{name}@example.org", common_name=name, **options)
    made.private_key_and_cert_chain_pem.write_to_path(str(file))
    return file


def test_certificates_of_clients(node: Node, tmp_path: Path):
    """A name that is listed may what is listed; a token still does; strangers do not get through."""
    ours, another = trustme.CA(), trustme.CA()
    ca = tmp_path / "ca.pem"
    ours.cert_pem.write_to_path(str(ca))
    variables = {
        "FOREBAY_API__ANONYMOUS": "false",
        "FOREBAY_API__TLS_CERT": str(certificate(ours, tmp_path, "server")),
        "FOREBAY_API__TLS_CLIENT_CA": str(ca),
        "FOREBAY_API__CLIENT": json.dumps([{"name": "ops", "scopes": ["stage"]}]),
    }
    service = Service(node, **variables)
    service.url = service.url.replace("http:", "https:")
    service.start("stager", "api")
    ops = certificate(ours, tmp_path, "ops")

    def client(cert: Path | None, token: str | None = None) -> Client:
        return service.client(token, ca_file=ca, cert_file=cert)

    with client(ops) as known:
        assert known.tiers().node
        with pytest.raises(DatasetNotFound):
            known.stage("x")
        with pytest.raises(Forbidden, match="cert:ops may read, stage"):
            known.evict("x")
    assert "cert:ops" in {line["who"] for line in service.audit()}
    with client(None, service.token("read")) as known:
        assert known.tiers().node
    with client(None) as unknown, pytest.raises(Unauthorized):
        unknown.tiers()
    with (
        client(certificate(ours, tmp_path, "eve")) as unknown,
        pytest.raises(Forbidden, match="'eve' is not listed"),
    ):
        unknown.tiers()
    yesterday = datetime.now(UTC) - timedelta(days=1)
    old = certificate(ours, tmp_path, "ops", not_before=yesterday - timedelta(days=1), not_after=yesterday)
    for wrong in (certificate(another, tmp_path, "ops"), old):
        with client(wrong) as unknown, pytest.raises(DaemonUnavailable):
            unknown.tiers()
    with (
        service.client(cert_file=ops) as unknowing,
        pytest.raises(DaemonUnavailable, match="CERTIFICATE_VERIFY"),
    ):
        unknowing.tiers()
    with pytest.raises(ConfigError, match="cert_file"):
        client(tmp_path / "none.pem")

    node.set(FOREBAY_API_CA=str(ca), FOREBAY_API_CERT=str(ops))
    assert forebay("--api", service.url, "ls", "--json").stdout.strip() == "[]"
    with own_node() as other:
        cluster = {
            "CLUSTER__NODES": json.dumps([service.url]),
            "CLUSTER__CA_FILE": str(ca),
            "CLUSTER__CERT_FILE": str(ops),
        }
        gateway = Service(other, **{f"FOREBAY_{name}": value for name, value in cluster.items()})
        gateway.start("api")
        with Client(f"unix://{other.settings.api_socket}") as asked:
            (entry,) = asked.nodes().items
        assert entry.problem is None and entry.state is not None


@pytest.mark.parametrize(
    "variables", [{}, {"FOREBAY_API__TLS_CLIENT_CA": "/x", "FOREBAY_API__TLS_CERT": "/x"}]
)
def test_nobody_listens_to_strangers(node: Node, variables: dict[str, str]):
    with pytest.raises(DaemonUnavailable):
        Service(node, FOREBAY_API__HOST="0.0.0.0", **variables).start("api")
    assert "loopback only" in node.log("api")
