"""The daemons of this node, as the routes ask them."""

from __future__ import annotations

from importlib.metadata import version
from typing import TypeVar

import anyio

from forebay.api.auth.principal import Principal
from forebay.api.auth.sources import may_see_run
from forebay.core.caller import Caller
from forebay.core.config import Settings
from forebay.core.errors import ForebayError, NotFound
from forebay.core.protocol import (
    AttemptStatus,
    CheckpointStatus,
    Dataset,
    DatasetReply,
    FindDataset,
    GetStatus,
    JobReply,
    ListRanks,
    Message,
    Once,
    Rank,
    Ranks,
    StageJob,
    StagerStatus,
    WaitJob,
    encode,
)

M = TypeVar("M", bound=Message)


class Daemons:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.version = version("forebay")
        self.stager = Caller(settings.stager_socket, "api")
        self.checkpoint = Caller(settings.checkpoint_socket, "api")

    async def once(
        self, who: Principal, key: str | None, message: Message, expect: type[M], timeout_s: float = 60.0
    ) -> M:
        """Asked of stagerd; with a key, which is the caller's own, at most once, whoever is restarted."""
        if key is not None:
            message = Once(f"{who.name}\0{who.tenant}\0{key}", encode(message))
        return await self.stager.ask(message, expect, timeout_s=timeout_s)

    async def dataset(self, who: Principal, id_or_name: str) -> Dataset:
        """Raises DatasetNotFound, also for what is another tenant's."""
        return (await self.stager.ask(FindDataset(id_or_name, who.tenant), DatasetReply)).dataset

    async def job(
        self, who: Principal, job_id: str, after: int | None = None, wait_s: float = 0.0
    ) -> StageJob:
        """When it has moved past version `after`, or after the time. Raises NotFound."""
        request = WaitJob(job_id, -1 if after is None else after, wait_s)
        job = (await self.stager.ask(request, JobReply, timeout_s=wait_s + 30.0)).job
        if not who.sees(job.tenant):
            raise NotFound(f"there is no stage job {job_id!r}")
        return job

    async def ranks(self, who: Principal) -> list[Rank]:
        """Those on this node that the caller may see."""
        found = (await self.stager.ask(ListRanks(), Ranks)).ranks
        return [rank for rank in found if who.sees(rank.tenant)]

    def seen(self, who: Principal, attempts: list[AttemptStatus]) -> list[AttemptStatus]:
        """Those of runs that the caller may see."""
        return [attempt for attempt in attempts if may_see_run(attempt.run, who, self.settings)]

    async def states(self) -> tuple[StagerStatus | ForebayError, CheckpointStatus | ForebayError]:
        """Of both, asked at once."""
        found: dict[str, StagerStatus | CheckpointStatus | ForebayError] = {}

        async def ask(caller: Caller, expect: type[Message]) -> None:
            try:
                found[caller.path.stem] = await caller.ask(GetStatus(), expect, timeout_s=10.0)  # type: ignore[assignment]
            except ForebayError as err:
                found[caller.path.stem] = err

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, self.stager, StagerStatus)
            tasks.start_soon(ask, self.checkpoint, CheckpointStatus)
        return found["stager"], found["checkpoint"]  # type: ignore[return-value]

    async def aclose(self) -> None:
        await self.stager.aclose()
        await self.checkpoint.aclose()
