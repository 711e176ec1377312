"""The training script: plain DDP on two ranks, with Forebay's loader and checkpoints.

Run by torchrun. All that is special to the demo is that it writes down what it saw.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forebay.benchmarks.demo.digits import test_split
from forebay.benchmarks.demo.job import Job, Result, Step
from forebay.checkpointd import Checkpointer
from forebay.core.errors import NoCheckpoint
from forebay.loaders import DataLoader, StagedDataset


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


class Trainer:
    """One rank."""

    def __init__(self, job: Job) -> None:
        self.job = job
        torch.manual_seed(job.seed)
        self.net = DistributedDataParallel(model())
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=2e-3)
        dataset = StagedDataset(job.dataset, fields=("png", "cls", "__key__"), decode="auto")
        self.loader = DataLoader(
            dataset, job.batch_size, shuffle=True, seed=job.seed, shuffle_block=job.shuffle_block
        )
        self.checkpoints = Checkpointer(job.run, upstream=job.upstream)
        self.step = self.resumed_from_step = self.epoch = 0

    def resume(self) -> None:
        """From the newest committed checkpoint, if there is one."""
        try:
            self.resumed_from_step, state = self.checkpoints.restore()
        except NoCheckpoint:
            return
        self.step, self.epoch = self.resumed_from_step, state["epoch"]
        self.net.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])

    def state(self) -> dict[str, Any]:
        return {
            "model": self.net.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "epoch": self.epoch,
        }

    def train(self, notes: Notes) -> None:
        while self.epoch < self.job.epochs:
            self.loader.set_epoch(self.epoch)
            for images, labels, keys in self.loader:
                loss = nn.functional.cross_entropy(self.net(images.float() / 255), labels)
                self.optimizer.zero_grad()
                torch.autograd.backward(loss)
                self.optimizer.step()
                self.step += 1
                blocked_ms = self.save() if self.step % self.job.checkpoint_every == 0 else None
                notes.write(Step(self.step, self.epoch, keys, _digest(images, labels), blocked_ms))
            self.epoch += 1
        self.save()
        self.checkpoints.wait()

    def save(self) -> float:
        """Milliseconds that the trainer was held up."""
        began_at = time.perf_counter()
        self.checkpoints.save(self.step, self.state())
        return (time.perf_counter() - began_at) * 1000

    def accuracy(self) -> float:
        images, labels = test_split()
        with torch.no_grad():
            guesses = self.net.module(images.float() / 255).argmax(1)
        return float((guesses == labels).float().mean())


class Notes:
    """The rank's log, a line per step, and a word to the story about it."""

    def __init__(self, path: Path, progress: str | None) -> None:
        self._file = path.open("wb", buffering=0)
        self._progress = progress
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def write(self, step: Step) -> None:
        self._file.write(msgspec.json.encode(step) + b"\n")
        if self._progress:
            self._socket.sendto(f"{step.step} {os.getpid()}".encode(), self._progress)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@contextmanager
def notes(job: Job, rank: int) -> Iterator[Notes]:
    found = Notes(job.log(rank), job.progress if rank == dist.get_world_size() - 1 else None)
    try:
        yield found
    finally:
        found.close()


def _digest(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainer = Trainer(job)
    trainer.resume()
    with notes(job, rank) as written:
        trainer.train(written)
    if rank == 0:
        weights = trainer.net.module.state_dict()
        digest = _digest(*(weights[name] for name in sorted(weights)))
        result = Result(trainer.accuracy(), trainer.step, trainer.resumed_from_step, digest)
        job.result.write_bytes(msgspec.json.encode(result))
    trainer.checkpoints.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
