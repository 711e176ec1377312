"""stagerd's messages."""

from __future__ import annotations

from typing import Literal

import msgspec

from forebay.core.protocol.message import Message

JobState = Literal["running", "done", "partial", "failed", "cancelled"]
Target = Literal["hot", "warm"]


class Dataset(msgspec.Struct, frozen=True):
    """A registered dataset at one listing of its source."""

    id: str
    name: str
    url: str
    format: str
    tenant: str
    fingerprint: str
    shards: int
    size_bytes: int
    largest_bytes: int
    staged_shards: int = 0
    staged_bytes: int = 0


class Register(Message, tag="register", frozen=True):
    """List `url` (a prefix, or the given keys below it) and freeze it -> DatasetReply + manifest.

    The descriptor is the manifest, an Arrow IPC file (see stager.manifest).
    """

    url: str
    format: str = "webdataset"
    name: str | None = None
    keys: list[str] | None = None
    tenant: str = ""


class OpenDataset(Message, tag="open_dataset", frozen=True):
    """-> DatasetReply + manifest, of the newest listing registered under that name."""

    name: str


class DatasetReply(Message, tag="dataset", frozen=True):
    dataset: Dataset


class FindDataset(Message, tag="find_dataset", frozen=True):
    """-> DatasetReply without a manifest, with what is staged: of an id, or the newest of a name."""

    name: str
    tenant: str | None = None


class ListDatasets(Message, tag="list_datasets", frozen=True):
    """-> Datasets."""


class Datasets(Message, tag="datasets", frozen=True):
    datasets: list[Dataset]


class OpenPlan(Message, tag="open_plan", frozen=True):
    """What this session will read: shard numbers in order of first use -> Done.

    `window` is how many consecutive entries it holds open at once. Replaces an earlier plan.
    `name` is what other connections call it by.
    """

    dataset_id: str
    shards: list[int]
    window: int
    name: str = ""


class Advance(Message, tag="advance", frozen=True):
    """The session now asks for entry `position` of its plan: what lies before is past -> Done."""

    position: int


class NeedShard(Message, tag="need_shard", frozen=True):
    """A rank wants this shard now -> ShardReady + data (+ index when `has_index`).

    The shard is leased until ReleaseShard or the end of the connection. Loaders take one connection
    per shard: closing it is the release, and no other request ever waits behind this one.
    `index` names the way in which the shard is cut into samples, which may be cut in several.
    """

    dataset_id: str
    shard: int
    index: str = ""


class ShardReady(Message, tag="shard_ready", frozen=True):
    size_bytes: int
    digest: str
    has_index: bool


class ReleaseShard(Message, tag="release_shard", frozen=True):
    """-> Done."""

    dataset_id: str
    shard: int


class PublishIndex(Message, tag="publish_index", frozen=True):
    """The sample index of a shard, built by whoever mapped it first -> Done. `index` as in NeedShard."""

    dataset_id: str
    shard: int
    samples: int
    payload: bytes
    index: str = ""


class GetCounts(Message, tag="get_counts", frozen=True):
    """-> Counts. `index` as in NeedShard."""

    dataset_id: str
    index: str = ""


class Counts(Message, tag="counts", frozen=True):
    """Samples per shard, -1 where nobody has indexed it yet."""

    samples: list[int]


class ClaimIndex(Message, tag="claim_index", frozen=True):
    """Ask for a shard without index -> IndexTask; waits while others hold the last ones."""

    dataset_id: str
    index: str = ""


class IndexTask(Message, tag="index_task", frozen=True):
    """`shard` is None when every shard has an index."""

    shard: int | None


class Selection(msgspec.Struct, frozen=True):
    """Which shards of a dataset: all, or those that pass every test that is given.

    `glob` on the key (fnmatch), `keys` as they are, `sample` a share of them (0 to 1), the same each time.
    """

    glob: str | None = None
    keys: list[str] | None = None
    sample: float | None = None


class StageJob(msgspec.Struct, frozen=True):
    """Bring shards into a tier. `failed` maps keys to reasons; done + failed make total at the end.

    `partial` is a failure: some are there, not all. Times are seconds since the epoch.
    """

    id: str
    dataset: str
    dataset_id: str
    owner: str
    state: JobState
    selection: Selection
    tier: Target
    priority: float
    deadline_at: float | None
    pin: str | None
    shards_total: int
    shards_done: int
    bytes_total: int
    bytes_done: int
    failed: dict[str, str]
    version: int
    started_at: float
    ended_at: float | None = None
    rate_bps: float = 0.0
    eta_s: float | None = None
    tenant: str = ""


class Stage(Message, tag="stage", frozen=True):
    """-> JobReply. `priority` is the job's share beside others; `pin` keeps what it brings."""

    dataset_id: str
    selection: Selection = Selection()
    tier: Target = "hot"
    priority: float = 1.0
    deadline_s: float | None = None
    pin: bool = False
    pin_s: float | None = None
    owner: str = ""


class WaitJob(Message, tag="wait_job", frozen=True):
    """Returns when the job has moved past `version`, at its end, or after `timeout_s` -> JobReply."""

    job_id: str
    version: int = -1
    timeout_s: float = 0.0


class CancelJob(Message, tag="cancel_job", frozen=True):
    """Call it off; what it brought stays, what others want goes on -> JobReply."""

    job_id: str


class RetryJob(Message, tag="retry_job", frozen=True):
    """Try the failed shards of an ended job again -> JobReply."""

    job_id: str


class JobReply(Message, tag="job", frozen=True):
    job: StageJob


class ListJobs(Message, tag="list_jobs", frozen=True):
    """Those that fit, newest first -> Jobs. `before`: start and id of the last job of the page before."""

    limit: int = 1000
    before: tuple[float, str] | None = None
    state: JobState | None = None
    dataset: str | None = None
    owner: str | None = None
    tenant: str | None = None


class Jobs(Message, tag="jobs", frozen=True):
    """Newest first."""

    jobs: list[StageJob]


class Pin(msgspec.Struct, frozen=True):
    """Shards that are not evicted until it is dropped, or its time is over."""

    id: str
    owner: str
    dataset_id: str
    made_at: float
    expires_at: float | None
    tenant: str = ""


class AddPin(Message, tag="add_pin", frozen=True):
    """-> PinReply."""

    dataset_id: str
    owner: str
    selection: Selection = Selection()
    ttl_s: float | None = None


class PinReply(Message, tag="pin", frozen=True):
    pin: Pin


class DropPin(Message, tag="drop_pin", frozen=True):
    """-> Done."""

    pin_id: str


class ListPins(Message, tag="list_pins", frozen=True):
    """-> Pins."""


class Pins(Message, tag="pins", frozen=True):
    pins: list[Pin]


class Evict(Message, tag="evict", frozen=True):
    """Give up what is staged of a dataset, but for what is in use or pinned -> Evicted.

    `dry_run`: only say what would go.
    """

    dataset_id: str
    selection: Selection = Selection()
    dry_run: bool = False


class Evicted(Message, tag="evicted", frozen=True):
    shards: int
    kept: int


class TakeBandwidth(Message, tag="take_bandwidth", frozen=True):
    """checkpointd asks to move so many bytes up or down -> Done, when it may."""

    size_bytes: int
    restore: bool = False


class DiskStatus(msgspec.Struct, frozen=True):
    folder: str
    state: str
    capacity_bytes: int
    held_bytes: int
    failures: int


class SourceStatus(msgspec.Struct, frozen=True):
    """How hard a source is asked now."""

    name: str
    window: int
    throttled: int
    hedged: int


class StagerStatus(Message, tag="stager_status", frozen=True):
    """Bytes fetched, and read by loaders as their plans pass them, count since the daemon began."""

    pid: int
    node: str
    disks: list[DiskStatus]
    sources: list[SourceStatus]
    warm: str | None
    capacity_bytes: int
    held_bytes: int
    leased_bytes: int
    reserved_bytes: int
    shards: int
    sessions: int
    fetches: int
    fetched_cold_bytes: int
    fetched_warm_bytes: int
    evictions: int
    overflow_bytes: int
    read_bytes: int = 0
