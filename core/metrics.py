"""Every Prometheus metric, declared once; one registry per daemon.

Names follow forebay_<part>_<what>_<unit> (https://prometheus.io/docs/practices/naming/).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

STAGER = CollectorRegistry()
CHECKPOINT = CollectorRegistry()
API = CollectorRegistry()

stager_fetched_bytes = Counter(
    "forebay_stager_fetched_bytes", "Bytes brought into the hot tier", ["tier"], registry=STAGER
)
stager_fetches = Counter("forebay_stager_fetches", "Shards brought into the hot tier", registry=STAGER)
stager_evictions = Counter("forebay_stager_evictions", "Shards given up", registry=STAGER)
stager_hits = Counter("forebay_stager_hits", "Shards asked for that were staged", registry=STAGER)
stager_misses = Counter("forebay_stager_misses", "Shards asked for that were not staged", registry=STAGER)
stager_errors = Counter("forebay_stager_errors", "Failed fetches by error code", ["code"], registry=STAGER)
stager_wait_seconds = Histogram(
    "forebay_stager_wait_seconds", "Wait of a loader for a shard", registry=STAGER
)
stager_hot_bytes = Gauge("forebay_stager_hot_bytes", "Allocated bytes in the hot tier", registry=STAGER)
stager_capacity_bytes = Gauge("forebay_stager_capacity_bytes", "Capacity of the hot tier", registry=STAGER)
stager_sessions = Gauge("forebay_stager_sessions_count", "Connected sessions", registry=STAGER)

stager_damaged = Counter("forebay_stager_damaged", "Staged files found damaged", registry=STAGER)
stager_disk_failures = Counter("forebay_stager_disk_failures", "Failures of hot disks", registry=STAGER)
stager_overflows = Counter(
    "forebay_stager_overflows", "Shards served from memory because no disk could take them", registry=STAGER
)
stager_scrubbed_bytes = Counter("forebay_stager_scrubbed_bytes", "Bytes read again to check", registry=STAGER)
stager_granted_bytes = Counter(
    "forebay_stager_granted_bytes", "Bytes that checkpointd was let move", ["class"], registry=STAGER
)
warm_errors = Counter(
    "forebay_warm_errors", "Times the warm tier failed and was gone without", ["action"], registry=STAGER
)
warm_takeovers = Counter("forebay_warm_takeovers", "Claims of silent owners taken over", registry=STAGER)
warm_bytes = Gauge("forebay_warm_bytes", "Bytes in the warm tier when last counted", registry=STAGER)
transfer_hedges = Counter("forebay_transfer_hedges", "Second requests past the p95", registry=STAGER)
transfer_throttled = Counter(
    "forebay_transfer_throttled", "Requests that the source refused or left unanswered", registry=STAGER
)


def _of_rank(name: str, text: str) -> Gauge:
    return Gauge(name, text, ["rank", "dataset"], registry=STAGER)


rank_step = _of_rank("forebay_rank_step_count", "Steps of a rank on this node")
rank_wait_seconds = _of_rank("forebay_rank_wait_seconds", "Time that a rank has waited for batches")
rank_busy_seconds = _of_rank("forebay_rank_busy_seconds", "Time that a rank has worked on batches")
rank_waiting_seconds = _of_rank("forebay_rank_waiting_seconds", "Wait so far for the batch of this step")
rank_runway_seconds = _of_rank("forebay_rank_runway_seconds", "Time that the hot tier's bytes ahead last")
rank_skew_share = _of_rank("forebay_rank_skew_ratio", "p99 of the skew of waits in the job, of a step")
rank_storage_bound = _of_rank("forebay_rank_storage_bound", "1 when the job waits for storage")

checkpoint_seconds = Histogram(
    "forebay_checkpoint_seconds",
    "Seconds from absorbed to each level",
    ["level"],
    registry=CHECKPOINT,
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800),
)
checkpoint_absorbed_bytes = Counter(
    "forebay_checkpoint_absorbed_bytes", "Bytes taken over from trainers", registry=CHECKPOINT
)
checkpoint_copied_bytes = Counter(
    "forebay_checkpoint_copied_bytes",
    "Bytes of unchanged parts that upstream copied by itself",
    registry=CHECKPOINT,
)
checkpoint_committed = Counter("forebay_checkpoint_commits", "Commits written", registry=CHECKPOINT)
checkpoint_errors = Counter(
    "forebay_checkpoint_errors", "Failures by error code", ["code"], registry=CHECKPOINT
)
checkpoint_unchanged = Counter(
    "forebay_checkpoint_unchanged",
    "Snapshots whose tensors seem to be those of the save before",
    registry=CHECKPOINT,
)
checkpoint_pending = Gauge(
    "forebay_checkpoint_pending_count", "Attempts absorbed and not yet committed", registry=CHECKPOINT
)

api_requests = Counter(
    "forebay_api_requests", "Requests by method and status", ["method", "status"], registry=API
)
api_seconds = Histogram("forebay_api_seconds", "Time from a request to the end of its reply", registry=API)


def render(registry: CollectorRegistry) -> str:
    """The Prometheus text format."""
    return generate_latest(registry).decode()
