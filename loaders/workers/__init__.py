"""Who makes batches: threads of this process, or processes of their own for transforms that keep the GIL.

maker      what both are, and threads
processes  the trainer's side: one child for each thread, and what becomes of one that dies
child      the other side: maps shards by a session of its own
transport  batches from a child's memory, by descriptors
"""

from __future__ import annotations

from forebay.loaders.workers.child import Recipe
from forebay.loaders.workers.maker import BatchMaker, Collate, InThreads
from forebay.loaders.workers.processes import InProcesses, StartMethod

__all__ = ["BatchMaker", "Collate", "InProcesses", "InThreads", "Recipe", "StartMethod"]
