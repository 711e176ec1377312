"""Register a dataset and follow a stage job on one connection: for benches and tests."""

from __future__ import annotations

from collections.abc import Callable

from forebay.core.channel import Channel, close_all
from forebay.core.protocol import Dataset, DatasetReply, JobReply, Register, Stage, StageJob, WaitJob

_WAIT_S = 20.0


def register(channel: Channel, request: Register) -> Dataset:
    reply, fds = channel.request(request, expect=DatasetReply, timeout_s=600)
    close_all(fds)
    return reply.dataset


def run_job(
    channel: Channel, request: Stage, stop: Callable[[StageJob], bool] = lambda job: False
) -> StageJob:
    return follow(channel, channel.request(request, expect=JobReply)[0].job, stop)


def follow(channel: Channel, job: StageJob, stop: Callable[[StageJob], bool] = lambda job: False) -> StageJob:
    """Until it ends, or `stop` says so after one of its moves."""
    while job.state == "running" and not stop(job):
        request = WaitJob(job.id, job.version, _WAIT_S)
        job = channel.request(request, expect=JobReply, timeout_s=_WAIT_S + 60)[0].job
    return job
