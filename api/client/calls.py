"""Every request that the API answers, and what comes back: one function each, for both clients."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from forebay.api.resources import (
    CheckpointDetails,
    CheckpointList,
    NodeJobs,
    NodeList,
    NodeState,
    Overview,
    Page,
    ProblemList,
    RankList,
    Save,
    Tiers,
)
from forebay.core.protocol import Dataset, Evicted, JobState, Level, Pin, ShardState, StageJob

T = TypeVar("T")
_READ_S = 3600.0
_LIST_S = 600.0


@dataclass(frozen=True)
class Call(Generic[T]):
    """`kind` is what the body of the answer becomes; None: there is none. `key` makes it safe to repeat."""

    method: str
    path: str
    kind: Any
    params: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] | None = None
    key: str | None = None
    timeout_s: float = 60.0

    def after(self, cursor: str) -> Call[T]:
        """The same for the next page."""
        return Call(
            self.method,
            self.path,
            self.kind,
            {**self.params, "cursor": cursor},
            self.body,
            None,
            self.timeout_s,
        )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _get(path: str, kind: Any, *, timeout_s: float = 60.0, **params: Any) -> Call[Any]:
    return Call("GET", path, kind, _given(**params), timeout_s=timeout_s)


def _post(path: str, kind: Any, *, key: str | None, timeout_s: float = 60.0, **body: Any) -> Call[Any]:
    return Call("POST", path, kind, {}, _given(**body), key or uuid.uuid4().hex, timeout_s)


def _part(text: object) -> str:
    return quote(str(text), safe="")


def datasets(
    *, name: str | None = None, format: str | None = None, limit: int | None = None
) -> Call[Page[Dataset]]:
    return _get("/v1/datasets", Page[Dataset], name=name, format=format, limit=limit)


def dataset(id_or_name: str) -> Call[Dataset]:
    return _get(f"/v1/datasets/{_part(id_or_name)}", Dataset)


def register(
    url: str,
    *,
    format: str = "webdataset",
    name: str | None = None,
    keys: list[str] | None = None,
    tenant: str | None = None,
    key: str | None = None,
) -> Call[Dataset]:
    body = _given(url=url, format=format, name=name, keys=keys, tenant=tenant)
    return _post("/v1/datasets", Dataset, key=key, timeout_s=_LIST_S, **body)


def evict(dataset: str, *, glob: str | None = None, dry_run: bool = False) -> Call[Evicted]:
    path = f"/v1/datasets/{_part(dataset)}/evict"
    return Call("POST", path, Evicted, {}, _given(glob=glob, dry_run=dry_run))


def shards(
    dataset: str, *, staged: bool | None = None, glob: str | None = None, limit: int | None = None
) -> Call[Page[ShardState]]:
    return _get("/v1/shards", Page[ShardState], dataset=dataset, staged=staged, glob=glob, limit=limit)


def jobs(
    *,
    state: JobState | None = None,
    dataset: str | None = None,
    owner: str | None = None,
    limit: int | None = None,
) -> Call[Page[StageJob]]:
    return _get("/v1/stage-jobs", Page[StageJob], state=state, dataset=dataset, owner=owner, limit=limit)


def stage(
    dataset: str,
    *,
    glob: str | None = None,
    keys: list[str] | None = None,
    sample: float | None = None,
    tier: Literal["hot", "warm"] = "hot",
    priority: float = 1.0,
    deadline_s: float | None = None,
    pin: bool = False,
    pin_s: float | None = None,
    owner: str | None = None,
    key: str | None = None,
) -> Call[StageJob]:
    body = _given(
        dataset=dataset, glob=glob, keys=keys, sample=sample, tier=tier, priority=priority,
        deadline_s=deadline_s, pin=pin, pin_s=pin_s, owner=owner,
    )  # fmt: skip
    return _post("/v1/stage-jobs", StageJob, key=key, **body)


def job(job_id: str, *, after: int | None = None, wait_s: float = 0.0) -> Call[StageJob]:
    """With `after` and `wait_s`: when its version is another, or after that time."""
    params = _given(after=after, wait_s=wait_s or None)
    return Call("GET", f"/v1/stage-jobs/{_part(job_id)}", StageJob, params, timeout_s=wait_s + 60.0)


def cancel(job_id: str) -> Call[StageJob]:
    return Call("DELETE", f"/v1/stage-jobs/{_part(job_id)}", StageJob)


def retry(job_id: str, *, key: str | None = None) -> Call[StageJob]:
    return _post(f"/v1/stage-jobs/{_part(job_id)}/retry", StageJob, key=key)


def pins(
    *, owner: str | None = None, dataset_id: str | None = None, limit: int | None = None
) -> Call[Page[Pin]]:
    return _get("/v1/pins", Page[Pin], owner=owner, dataset_id=dataset_id, limit=limit)


def pin(
    dataset: str,
    *,
    owner: str | None = None,
    glob: str | None = None,
    ttl_s: float | None = None,
    key: str | None = None,
) -> Call[Pin]:
    return _post("/v1/pins", Pin, key=key, dataset=dataset, owner=owner, glob=glob, ttl_s=ttl_s)


def unpin(pin_id: str) -> Call[None]:
    return Call("DELETE", f"/v1/pins/{_part(pin_id)}", None)


def tiers() -> Call[Tiers]:
    return _get("/v1/tiers", Tiers)


def overview() -> Call[Overview]:
    return _get("/v1/overview", Overview)


def lockstep(*, cluster: bool = False) -> Call[RankList]:
    return _get("/v1/lockstep", RankList, cluster=cluster or None)


def node() -> Call[NodeState]:
    return _get("/v1/node", NodeState)


def nodes() -> Call[NodeList]:
    return _get("/v1/nodes", NodeList)


def stage_on(
    nodes: list[str] | None = None,
    *,
    url: str | None = None,
    dataset: str | None = None,
    format: str = "webdataset",
    name: str | None = None,
    glob: str | None = None,
    pin: bool = False,
    key: str | None = None,
) -> Call[NodeJobs]:
    """On the nodes at these URLs, or on all."""
    body = _given(url=url, dataset=dataset, format=format, name=name, glob=glob, pin=pin, nodes=nodes)
    return _post("/v1/nodes/stage-jobs", NodeJobs, key=key, timeout_s=_LIST_S, **body)


def problems() -> Call[ProblemList]:
    return _get("/v1/problems", ProblemList)


def saves(
    *, run: str | None = None, level: Level | None = None, limit: int | None = None
) -> Call[Page[Save]]:
    return _get("/v1/saves", Page[Save], run=run, level=level, limit=limit)


def checkpoints(run: str | None = None, *, upstream: str | None = None) -> Call[CheckpointList]:
    """Of one run, or of all in the spool."""
    path = "/v1/checkpoints" if run is None else f"/v1/runs/{_part(run)}/checkpoints"
    return _get(path, CheckpointList, upstream=upstream, timeout_s=_READ_S)


def checkpoint(run: str, step: int, *, upstream: str | None = None) -> Call[CheckpointDetails]:
    return _get(_step(run, step), CheckpointDetails, upstream=upstream, timeout_s=_READ_S)


def verify(run: str, step: int, *, upstream: str | None = None) -> Call[CheckpointList]:
    params = _given(upstream=upstream)
    return Call("POST", f"{_step(run, step)}/verify", CheckpointList, params, timeout_s=_READ_S)


def remove(
    run: str, step: int, *, upstream: str | None = None, dry_run: bool = False
) -> Call[CheckpointList]:
    params = _given(upstream=upstream, dry_run=dry_run or None)
    return Call("DELETE", _step(run, step), CheckpointList, params, timeout_s=_READ_S)


def pin_checkpoint(run: str, step: int, *, upstream: str | None = None) -> Call[None]:
    return Call("PUT", f"{_step(run, step)}/pin", None, _given(upstream=upstream))


def unpin_checkpoint(run: str, step: int, *, upstream: str | None = None) -> Call[None]:
    return Call("DELETE", f"{_step(run, step)}/pin", None, _given(upstream=upstream))


def _step(run: str, step: int) -> str:
    return f"/v1/runs/{_part(run)}/checkpoints/{step}"
