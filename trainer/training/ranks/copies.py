"""Checkpoints in the memory of other processes: the files of torch's distributed checkpoints, sent to keepers."""

import io
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from trainer.cluster.keepers import KeeperLink, Span
from trainer.training.ranks.reading import METADATA_FILE, SafeReader

_PLACE = Path()  # the files of a copy are in no directory


def write_copy(state: dict[str, Any], step: int, keeper: KeeperLink) -> None:
    """Sends this rank's part of a state to its keeper. Every rank of the default process group must call it."""
    files = _Files()
    writer = FileSystemWriter(_PLACE, sync_files=False)
    writer.fs = files
    # What every rank has alike is in the first rank's file, so that each rank needs at most two files.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    distributed_checkpoint.save(state, storage_writer=writer, planner=planner)
    for name, file in files.contents.items():
        keeper.write(step, name, file.getbuffer())


class CopyReader(SafeReader):
    """Reads a copy; `keepers` are those of each rank that has written it."""

    def __init__(self, step: int, keepers: Sequence[KeeperLink]) -> None:
        super().__init__(_PLACE)
        self._step, self._keepers = step, keepers
        self._parts: dict[tuple[str, int], bytes] = {}
        self.fs = _Files()

    def open_metadata(self) -> io.BytesIO:
        return io.BytesIO(self._keepers[0].read(self._step, METADATA_FILE)[0])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what this rank needs of each file at once."""
        spans: dict[str, list[Span]] = defaultdict(list)
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            spans[place.relative_path].append((place.offset, place.length))
        for name, ranges in spans.items():
            keeper = self._keepers[int(name.removeprefix("__").partition("_")[0])]
            parts = keeper.read(self._step, name, ranges)
            self._parts |= {(name, start): part for (start, _), part in zip(ranges, parts, strict=True)}
            self.fs.contents[name] = io.BytesIO()
        done: Future[None] = super().read_data(plan, planner)
        self._parts.clear()
        return done

    def _slice_file(self, _file: io.IOBase, place: Any) -> io.BytesIO:
        return io.BytesIO(self._parts[place.relative_path, place.offset])


class _File(io.BytesIO):
    def close(self) -> None:
        """Keeps the content, which torch closes once it is written."""


class _Files(FileSystemBase):  # type: ignore[misc] # torch has no types here
    """Files in memory, by name."""

    def __init__(self) -> None:
        self.contents: dict[str, io.BytesIO] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.BytesIO]:
        if mode == "wb":
            self.contents[str(path)] = _File()
        yield self.contents[str(path)]

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> Path:
        return Path(path) / suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.contents[str(new_path)] = self.contents.pop(str(path))

    def init_path(self, path: str | os.PathLike[str]) -> Path:
        return Path(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Does nothing: there are no directories."""

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return str(path) in self.contents

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        del self.contents[str(path)]
