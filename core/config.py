"""Settings: one TOML file and FOREBAY_* variables; every default is here.

The file is the one named by FOREBAY_CONFIG, else /etc/forebay/forebay.toml. A variable beats the
file: FOREBAY_STAGER__CAPACITY=200GB sets `capacity` in `[stager]`. Sizes take units (`200GB`,
`1.5TiB`). An unknown key is an error, never ignored.
"""

from __future__ import annotations

import os
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from forebay.core.errors import ConfigError

DEFAULT_CONFIG = Path("/etc/forebay/forebay.toml")
# struct sockaddr_un on Linux holds 108 bytes, the last one NUL (unix(7)).
_SOCKET_PATH_MAX = 107

_bytes_of = TypeAdapter(ByteSize)


def _size(text: str | int) -> int:
    return int(_bytes_of.validate_python(text))


# A plain int after reading: ByteSize itself would travel badly (messages, SQL, arithmetic).
Size = Annotated[int, BeforeValidator(_size), Field(ge=0)]


def _paths(value: object) -> object:
    """One path, several with `:` between them, or a list."""
    return tuple(value.split(os.pathsep)) if isinstance(value, str) and value else value


Paths = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_paths)]


def _default_home() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/forebay")
    return Path.home() / ".local/share/forebay"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StagerSettings(_Section):
    """stagerd: the hot tier of this node."""

    hot_dir: Paths = Field((), description="directories on local NVMe, one per disk; default <home>/hot")
    capacity: Size = Field(_size("100GB"), description="allocated bytes the hot tier may hold, all disks")
    reserve: Size = Field(_size("256MiB"), description="bytes of each disk left free whatever happens")
    reserve_inodes: int = Field(1000, ge=0, description="inodes of each disk left free")
    overflow: Size = Field(_size("1GiB"), description="memory for shards that no disk can take")
    low_water: float = Field(1.0, gt=0, le=1, description="share of the capacity that idle shards are cut to")
    high_water: float = Field(1.0, gt=0, le=1, description="share that starts the cutting; 1: never")
    quotas: dict[str, Size] = Field(default={}, description="most allocated bytes per tenant")
    lookahead: Size = Field(_size("4GiB"), description="bytes fetched ahead of each loader's plan")
    concurrency: int = Field(32, ge=1, le=256, description="shards fetched at once")
    wait_s: float = Field(120.0, gt=0, description="longest wait of a loader for one shard")
    stall_s: float = Field(10.0, gt=0, description="a disk silent for so long counts as failing")
    scrub_rate: Size = Field(_size("50MB"), description="bytes per second read again to check; 0: never")
    drain_s: float = Field(5.0, gt=0, description="longest wait for ranges on their way at the end")


class WarmSettings(_Section):
    """The warm tier: a directory that the nodes share, or any URL."""

    url: str | None = Field(None, description="path or URL; none: every node fetches from cold")
    capacity: Size = Field(0, description="bytes it may hold, all nodes together; 0: no limit")
    coordinator: str = Field("claims", description="who fetches: `claims` (files beside) or redis://host")
    heartbeat_s: float = Field(2.0, gt=0, description="how often a claim's owner shows that it lives")
    stale_s: float = Field(10.0, gt=0, description="a claim without sign of life for so long is taken over")
    timeout_s: float = Field(10.0, gt=0, description="longest wait for one answer of the warm tier")


class TransferSettings(_Section):
    """How one object is moved."""

    range_bytes: Size = Field(_size("16MiB"), description="size of one range of a large object")
    whole_bytes: Size = Field(_size("32MiB"), description="up to this size an object is one GET")
    inflight_bytes: Size = Field(_size("512MiB"), description="bytes in memory at once, all fetches together")
    attempts: int = Field(4, ge=1, description="tries per request")
    attempt_timeout_s: float = Field(30.0, gt=0, description="limit of one request")


class NetworkSettings(_Section):
    """What all transfers of the node share."""

    rate: Size = Field(0, description="bytes per second, in and out together; 0: no limit")


class SourceSettings(_Section):
    """How to reach what lies below a URL; the longest that fits counts."""

    url: str
    rate: Size = Field(0, description="bytes per second; 0: no limit")
    concurrency: int = Field(64, ge=1, le=1024, description="most requests at once")
    proxy: str | None = Field(None, description="URL of an HTTP proxy")
    ca_file: Path | None = Field(None, description="certificates (PEM) to trust besides the system's")
    requester_pays: bool = False
    profile: str | None = Field(None, description="profile of the AWS configuration files")


class CheckpointSettings(_Section):
    """checkpointd: the spool of this node."""

    spool_dir: Path | None = Field(None, description="directory on local NVMe; default <home>/spool")
    keep_local: int = Field(2, ge=1, description="committed checkpoints kept in the spool per run")
    arena_bytes: Size | None = Field(
        None, ge=1 << 20, description="largest snapshot in memory; more goes to the disk in waves, saves wait"
    )
    part_bytes: Size = Field(
        _size("16MiB"), ge=5 << 20, description="size of one part of a multipart upload; S3 takes no smaller"
    )
    upload_timeout_s: float = Field(600.0, gt=0, description="longest upload of one file, tries together")
    wait_s: float = Field(600.0, gt=0, description="longest wait of a client for a level")
    keep_memory_s: float = Field(
        900.0, ge=0, description="how long what a dead trainer saved last stays in memory for the next one"
    )
    partner: str | None = Field(
        None, description="URL of a second place, off this node, for what is not upstream yet"
    )
    partner_timeout_s: float = Field(60.0, gt=0, description="longest time to bring a file there")
    drain_to: Literal["local", "replicated", "durable", "committed"] = Field(
        "local", description="how far what is open is brought before the daemon ends"
    )
    drain_s: float = Field(25.0, ge=0, description="longest time for that")


class DropboxSettings(_Section):
    """A folder that another tool writes checkpoints to (`[[dropbox]]`)."""

    path: Path
    run: str = Field(description="name of the run, and of its folder upstream")
    upstream: str | None = Field(None, description="URL where its checkpoints become durable")
    recipe: Literal["hf", "lightning", "megatron", "dcp", "file"] = Field(
        description="who writes there, and so when a checkpoint is complete"
    )
    settle_s: float = Field(5.0, gt=0, description="how long its files must lie still")


ScopeName = Literal["read", "stage", "admin"]


class OidcSettings(_Section):
    """Tokens of an OpenID provider (`[api.oidc]`)."""

    issuer: str = Field(description="URL of the issuer, as its tokens name it")
    audience: str = Field(description="what its tokens for this service name as audience")
    roles_claim: str = Field("roles", description="claim that holds the roles, with dots into nested ones")
    roles: dict[str, tuple[ScopeName, ...]] = Field(
        {"forebay-read": ("read",), "forebay-stage": ("stage",), "forebay-admin": ("admin",)},
        description="scopes of each role",
    )
    tenant_claim: str | None = Field(None, description="claim that holds the tenant; none: no tenants")
    ca_file: Path | None = Field(None, description="certificates (PEM) to trust instead of the system's")


class ClientSettings(_Section):
    """A client certificate that is let in (`[[api.client]]`), by its common name."""

    name: str
    scopes: tuple[ScopeName, ...] = ("read",)
    tenant: str | None = None


class ApiSettings(_Section):
    """forebay-api: REST and the dashboard."""

    host: str = Field("127.0.0.1", description="address to listen on; beyond loopback callers must be known")
    port: int = Field(8370, ge=0, le=65535)
    names: tuple[str, ...] = Field((), description="host names besides localhost that a loopback API has")
    anonymous: bool = Field(True, description="on loopback, serve requests without a token")
    group: str | None = Field(None, description="Unix group that may use the socket besides the owner")
    group_scopes: tuple[ScopeName, ...] = ("read", "stage")
    tls_cert: Path | None = Field(None, description="certificate chain (PEM)")
    tls_key: Path | None = Field(None, description="its key (PEM)")
    tls_client_ca: Path | None = Field(None, description="who signs client certificates (PEM)")
    oidc: OidcSettings | None = None
    client: tuple[ClientSettings, ...] = ()
    sources: tuple[str, ...] = Field(
        ("s3://", "gs://", "az://"), description="prefixes of URLs that a request may name"
    )
    body: Size = Field(_size("8MiB"), description="largest request")
    rate: float = Field(2000.0, ge=0, description="requests per second of one caller; 0: no limit")
    concurrency: int = Field(256, ge=1, description="requests at once")
    streams: int = Field(256, ge=1, description="followers of stage jobs at once")
    receive_s: float = Field(10.0, gt=0, description="longest time that a caller may take to send a request")
    drain_s: float = Field(10.0, ge=0, description="longest wait for open requests at the end")


class TenantSettings(_Section):
    """What a tenant may name (`[[tenant]]`); what it may hold is in stager.quotas."""

    name: str
    sources: tuple[str, ...] = Field((), description="prefixes of URLs")
    runs: tuple[str, ...] = Field((), description="names of runs, with * for any part")


class ClusterSettings(_Section):
    """The other nodes, for a gateway: listed, named by DNS, or announced in Redis."""

    nodes: tuple[str, ...] = Field((), description="URLs of the nodes' APIs")
    dns: str | None = Field(None, description="URL whose host has one address per node")
    redis: str | None = Field(None, description="redis://host: nodes announce themselves there")
    url: str | None = Field(None, description="URL under which this node announces itself")
    token_file: Path | None = Field(None, description="file with the token for the nodes' APIs")
    ca_file: Path | None = Field(None, description="certificates (PEM) of the nodes' APIs")
    cert_file: Path | None = Field(None, description="certificate and key (PEM) to be known by there")
    timeout_s: float = Field(10.0, gt=0, description="longest wait for one node")


class S3Settings(_Section):
    """The object store; secrets come from AWS_* variables, profiles or instance metadata only."""

    endpoint: str | None = Field(None, description="default AWS_ENDPOINT_URL, else AWS itself")
    region: str | None = Field(None, description="default AWS_REGION, else us-east-1")
    anonymous: bool = Field(False, description="send unsigned requests (public buckets)")


class Settings(BaseSettings):
    """All settings of a node. `Settings.load()` reads them, `paths` are derived from them."""

    model_config = SettingsConfigDict(
        env_prefix="FOREBAY_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    home: Path = Field(default_factory=_default_home, description="state of this node")
    node: str = Field(default_factory=socket.gethostname, description="name of this node among others")
    stager: StagerSettings = StagerSettings()  # type: ignore[call-arg]
    warm: WarmSettings = WarmSettings()  # type: ignore[call-arg]
    transfer: TransferSettings = TransferSettings()  # type: ignore[call-arg]
    network: NetworkSettings = NetworkSettings()  # type: ignore[call-arg]
    source: tuple[SourceSettings, ...] = ()
    checkpoint: CheckpointSettings = CheckpointSettings()  # type: ignore[call-arg]
    dropbox: tuple[DropboxSettings, ...] = ()
    api: ApiSettings = ApiSettings()  # type: ignore[call-arg]
    tenant: tuple[TenantSettings, ...] = ()
    cluster: ClusterSettings = ClusterSettings()  # type: ignore[call-arg]
    s3: S3Settings = S3Settings()  # type: ignore[call-arg]

    @property
    def hot_dirs(self) -> tuple[Path, ...]:
        return self.stager.hot_dir or (self.home / "hot",)

    def source_of(self, url: str) -> SourceSettings:
        """What was set for the longest URL that `url` lies below, else the defaults."""
        fitting = [s for s in self.source if f"{url}/".startswith(f"{s.url.rstrip('/')}/")]
        return max(fitting, key=lambda s: len(s.url), default=SourceSettings(url=url))  # type: ignore[call-arg]

    @property
    def spool_dir(self) -> Path:
        return self.checkpoint.spool_dir or self.home / "spool"

    @property
    def stager_socket(self) -> Path:
        return _socket(self.home / "run/stager.sock")

    @property
    def checkpoint_socket(self) -> Path:
        return _socket(self.home / "run/checkpoint.sock")

    @property
    def api_socket(self) -> Path:
        return _socket(self.home / "run/api.sock")

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Read file and environment; `overrides` win over both.

        Raises ConfigError that names the key and where it stands.
        """
        path = Path(os.environ.get("FOREBAY_CONFIG", DEFAULT_CONFIG))
        if "FOREBAY_CONFIG" in os.environ and not path.is_file():
            raise ConfigError(f"FOREBAY_CONFIG names {path}, which is not a file")
        try:
            return _reader(path)(**overrides)
        except tomllib.TOMLDecodeError as err:
            raise ConfigError(f"{path} is not TOML: {err}") from err
        except ValidationError as err:
            raise ConfigError(_explain(err, path)) from err


def _reader(path: Path) -> type[Settings]:
    class FileSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path))

    return FileSettings


def _explain(err: ValidationError, path: Path) -> str:
    where = f"{path} or FOREBAY_* variables" if path.is_file() else "FOREBAY_* variables"
    parts = []
    for item in err.errors():
        key = ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key `{key}`")
        else:
            parts.append(f"`{key}`: {item['msg']}")
    return f"in {where}: " + "; ".join(parts)


def _socket(path: Path) -> Path:
    if len(os.fsencode(path)) > _SOCKET_PATH_MAX:
        raise ConfigError(
            f"the socket path {path} is longer than {_SOCKET_PATH_MAX} bytes, the limit of the kernel",
            hint="set a shorter `home`",
        )
    return path
