"""Batches made by child processes: a thread here for each, which hands it rows and takes the batch."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

from forebay.core.errors import Cancelled, InvalidRequest, WorkerLost
from forebay.loaders.batch import Shards
from forebay.loaders.order import Ints
from forebay.loaders.pool import cuda_runs
from forebay.loaders.source import Session
from forebay.loaders.workers.child import Failed, Forget, Make, Recipe, run
from forebay.loaders.workers.transport import Inbox

StartMethod = Literal["spawn", "fork"]
_START_S = 120.0
_END_S = 5.0


class InProcesses:
    """`number` children, from now until `close()`.

    spawn: each starts afresh and imports the script, which needs `if __name__ == "__main__"`; whatever
    is passed must be found by import. fork: copies of this process, at once; refused when CUDA or other
    threads run already, as both would be broken in the copy.
    """

    def __init__(self, recipe: Recipe, number: int, method: StartMethod) -> None:
        self._pid = os.getpid()
        self._recipe = recipe
        self._method: StartMethod = method
        self._children = self._start(range(number))
        # Places, so that a child that was replaced is not asked again.
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(number):
            self._idle.put(place)

    @property
    def failed(self) -> int:
        return sum(child.failed for child in self._children)

    def begin(self) -> None:
        """Those that are gone are replaced."""
        lost = [place for place, child in enumerate(self._children) if not child.alive]
        for place, child in zip(lost, self._start(lost), strict=True):
            self._children[place] = child

    def _start(self, places: Sequence[int]) -> list[_Process]:
        if places and self._method == "fork":
            _refuse_unsafe_fork()
        context = multiprocessing.get_context(self._method)
        return [_Process(context, self._recipe, place) for place in places]

    def enter_thread(self) -> None:
        return

    def make(self, session: Session, rows: Ints, shards: Shards) -> Any:
        """Raises WorkerLost when the child dies, and what it raised."""
        place = self._idle.get()
        try:
            return self._children[place].make(session, rows, keep=bool(shards))
        finally:
            self._idle.put(place)

    def forget(self, shards: Iterable[int]) -> None:
        for child in self._children:
            child.tell(Forget(list(shards)))

    def abandon(self) -> None:
        for child in self._children:
            if child.busy:
                child.kill()

    def close(self) -> None:
        """All are told before the first is waited for. A forked copy of the trainer has none."""
        if os.getpid() != self._pid:
            return
        for child in self._children:
            child.end()
        for child in self._children:
            child.wait()


class _Process:
    """A child, and what it is told. One thread at a time asks; forgetting is told by any."""

    def __init__(self, context: Any, recipe: Recipe, place: int) -> None:
        self._own, theirs = context.Pipe()
        self._telling = threading.Lock()
        self._inbox = Inbox(self._own)
        self._ready = False
        self.busy = False
        self.failed = 0
        self._process = context.Process(
            target=run, args=(recipe, theirs, place), name=f"forebay-worker-{place}", daemon=True
        )
        try:
            self._process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as err:
            raise InvalidRequest(
                f"a transform, decoder or collate_fn cannot be sent to a process: {err}",
                hint="define it at the top of a module, or take workers='fork' or workers='thread'",
            ) from err
        theirs.close()

    def make(self, session: Session, rows: Ints, *, keep: bool) -> Any:
        self.busy = True
        try:
            self._await_ready()
            with self._telling:
                if session.closed:
                    raise Cancelled("the pass is over")
                freed = self._inbox.take_freed()
                self._own.send(Make(session.socket, session.dataset.id, rows, keep, freed))
            batch, self.failed = self._inbox.receive()
        except (EOFError, OSError) as err:
            raise self._lost() from err
        finally:
            self.busy = False
        if isinstance(batch, Failed):
            raise batch.error
        return batch

    def tell(self, forget: Forget) -> None:
        """A child that is gone has forgotten."""
        with self._telling, suppress(OSError):
            self._own.send(forget)

    def end(self) -> None:
        """Both sides read an end; the descriptor stays until nobody reads it any more."""
        with socket.socket(fileno=os.dup(self._own.fileno())) as own, suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def wait(self) -> None:
        self._process.join(_END_S)
        if self._process.is_alive():
            self.kill()

    def _await_ready(self) -> None:
        if self._ready:
            return
        if not self._own.poll(_START_S):
            raise WorkerLost(f"worker {self._process.pid} did not start within {_START_S:g} s")
        self._own.recv()
        self._ready = True

    def _lost(self) -> WorkerLost:
        self._process.join(_END_S)
        code = self._process.exitcode
        how = f"exit status {code}" if code is None or code >= 0 else f"killed by {_signal(code)}"
        if not self._ready:
            hint = "its message is above; a script whose loader has workers='process' needs " \
                "`if __name__ == \"__main__\":`"  # fmt: skip
        else:
            hint = "SIGKILL is mostly the kernel's, out of memory" if code == -signal.SIGKILL else ""
        return WorkerLost(f"worker process {self._process.pid} is gone ({how})", hint=hint)


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _refuse_unsafe_fork() -> None:
    hint = "make the loader earlier, or take workers='process', which starts afresh"
    if cuda_runs():
        raise InvalidRequest("workers='fork' after CUDA was initialised: it is broken in the copy", hint=hint)
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    for thread in others:
        # Ours of an earlier pass are about to end.
        if thread.name.startswith("forebay-"):
            thread.join(_END_S)
    alive = [thread.name for thread in others if thread.is_alive()]
    if alive:
        raise InvalidRequest(
            f"workers='fork' while other threads run ({', '.join(alive)}): what they hold stays locked "
            "in the copy for ever",
            hint=hint,
        )
