"""What else saves a state dict: torch.save, and torch.distributed.checkpoint in each of its ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

State = dict[str, torch.Tensor]
# Blocks as long as the trainer is blocked; what it returns waits for the rest.
Save = Callable[[State, Path], Callable[[], object]]


@contextmanager
def one_process_group(folder: Path) -> Iterator[None]:
    """What dcp wants around it."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def torch_save(state: State, target: Path) -> Callable[[], object]:
    torch.save(state, target)
    return lambda: None


def dcp_save(state: State, target: Path) -> Callable[[], object]:
    save(state, checkpoint_id=str(target))
    return lambda: None


def dcp_async_thread(state: State, target: Path) -> Callable[[], object]:
    return _waiting(async_save(state, checkpoint_id=str(target)))


def dcp_async_process(state: State, target: Path) -> Callable[[], object]:
    kind = AsyncCheckpointerType.PROCESS
    return _waiting(async_save(state, checkpoint_id=str(target), async_checkpointer_type=kind))


class SharedMemoryStager:
    """DefaultStager with its buffers in shared memory, kept from save to save."""

    def __init__(self) -> None:
        # Pinned memory and non-blocking copies need a GPU.
        self._stager = DefaultStager(StagingOptions(False, True, False, False))

    def __call__(self, state: State, target: Path) -> Callable[[], object]:
        kind = AsyncCheckpointerType.PROCESS
        return _waiting(
            async_save(
                state, checkpoint_id=str(target), async_stager=self._stager, async_checkpointer_type=kind
            )
        )


def _waiting(pending: object) -> Callable[[], object]:
    if isinstance(pending, Future):
        return pending.result
    upload: Future[object] = pending.upload_completion  # type: ignore[attr-defined]
    return upload.result


def peers() -> dict[str, Save]:
    return {
        "torch.save": torch_save,
        "dcp.save": dcp_save,
        "dcp.async_save": dcp_async_thread,
        "dcp.async_save, process": dcp_async_process,
        "dcp.async_save, process, shared memory": SharedMemoryStager(),
    }


def blocked(way: Save, state: State, folder: Path, rounds: int) -> list[float]:
    """Seconds that each save blocks; the rest is waited for in between."""
    seconds = []
    for number in range(rounds):
        began_at = time.perf_counter()
        finish = way(state, folder / str(number))
        seconds.append(time.perf_counter() - began_at)
        finish()
    return seconds
