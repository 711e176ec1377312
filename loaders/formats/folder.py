"""A folder tree with one file per sample, as torchvision's ImageFolder reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from forebay.loaders.formats.format import Format, Index, NoRows, ShardFile, missing

FILE, FOLDER = "file", "folder"


@dataclass(frozen=True)
class Folder(Format):
    """Fields: `file`, or the file's extension (`jpg;png`): its bytes; `folder`: the name of its folder.

    classes: the folders' names in order, so that `cls` is a number; all that there are, sorted, gives
        ImageFolder's numbers.
    """

    name: ClassVar[str] = "folder"
    block_shards: ClassVar[int] = 256
    single: ClassVar[bool] = True
    classes: tuple[str, ...] = ()

    def index(self, file: ShardFile) -> Index:
        return Index(1)

    def open(self, file: ShardFile, index: bytes, fields: Sequence[str]) -> _OneFile:
        return _OneFile(file, self.classes)


class _OneFile(NoRows):
    def __init__(self, file: ShardFile, classes: tuple[str, ...]) -> None:
        self.file = file
        self._classes = classes
        self._folder = file.name.split("/")[-2] if "/" in file.name else ""

    def __len__(self) -> int:
        return 1

    def key(self, sample: int) -> str:
        return self.file.name

    def value(self, sample: int, field: str) -> Any:
        if field == FOLDER:
            return self._folder
        if field == "cls" and self._folder in self._classes:
            return self._classes.index(self._folder)
        self._check(field)
        return self.file.data[: self.file.size_bytes]

    def spans(self, field: str) -> tuple[list[int], list[int]] | None:
        if field == FOLDER or (field == "cls" and self._folder in self._classes):
            return None
        self._check(field)
        return [0], [self.file.size_bytes]

    def _check(self, field: str) -> None:
        extension = self.file.base_name.rpartition(".")[2].lower()
        if field != FILE and extension not in field.split(";"):
            there = [FILE, extension, FOLDER, *(["cls"] if self._folder in self._classes else [])]
            raise missing(
                field, self.file.base_name, self.file, there, "Folder(classes=...) names the folders for cls"
            )
