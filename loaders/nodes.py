"""A DataLoader as a source of torchdata.nodes pipelines. https://meta-pytorch.org/data"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchdata.nodes import BaseNode

from forebay.loaders.loader import DataLoader

_LOADER = "loader"


class LoaderNode(BaseNode[Any]):  # type: ignore[misc]
    """Yields the loader's batches; the pipeline's state holds the loader's, so that it resumes at the batch.

    Each reset without a state begins the loader's next pass.
    """

    def __init__(self, loader: DataLoader) -> None:
        super().__init__()
        self._loader = loader
        self._batches: Iterator[Any] = iter(())

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        if initial_state is not None:
            self._loader.load_state_dict(initial_state[_LOADER])
        self._batches = iter(self._loader)

    def next(self) -> Any:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        return {_LOADER: self._loader.state_dict()}
