"""Reads torch's distributed checkpoints without running code that they may hold.

torch pickles the metadata and every value that is no tensor, and unpickling runs whatever a pickle names. Here only
the classes of the metadata and plain values pass.
"""

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from trainer.errors import CheckpointError

METADATA_FILE = ".metadata"
_BYTES_AT_ONCE = 2**32

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}


def load_safely(state: dict[str, Any], source: "Path | SafeReader", alone: bool = False) -> None:
    """Fills `state` from a checkpoint; `alone` reads in this process, without the other ranks.

    Raises pickle.UnpicklingError if the checkpoint holds more than tensors and plain values, and what torch raises.
    """
    distributed_checkpoint.load(
        state, storage_reader=_reader(source), planner=_Planner(), **({"no_dist": True} if alone else {})
    )


def read_metadata(source: "Path | SafeReader") -> Metadata:
    """The metadata of a checkpoint. Raises pickle.UnpicklingError if the file holds anything else."""
    return _reader(source).read_metadata()


def _reader(source: "Path | SafeReader") -> "SafeReader":
    return SafeReader(source) if isinstance(source, Path) else source


def stored_tensors(directory: Path, prefix: str) -> Iterator[dict[str, Tensor]]:
    """The tensors whose names have this prefix, without it: whole and on CPU, in groups of a few gigabytes.

    Raises CheckpointError if the files are damaged, FileNotFoundError if they were removed meanwhile.
    """
    try:
        stored = {
            name: entry
            for name, entry in read_metadata(directory).state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        for names in _groups(stored):
            part = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
            with warnings.catch_warnings(action="ignore"):  # torch warns that one process loads, as it should
                load_safely(part, directory, alone=True)
            yield {name.removeprefix(prefix): tensor for name, tensor in part.items()}
    except (
        *(distributed_checkpoint.CheckpointException, pickle.UnpicklingError),
        *(RuntimeError, ValueError, KeyError),
    ) as error:
        raise CheckpointError(f"{directory}: cannot be read: {error}", hint="name another checkpoint") from error


def _groups(stored: dict[str, TensorStorageMetadata]) -> Iterator[list[str]]:
    """The names, in groups whose tensors have about `_BYTES_AT_ONCE` bytes."""
    group: list[str] = []
    size = 0
    for name, entry in stored.items():
        group.append(name)
        size += entry.size.numel() * entry.properties.dtype.itemsize
        if size >= _BYTES_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


class SafeReader(FileSystemReader):  # type: ignore[misc] # torch has no types here
    """Reads a checkpoint directory."""

    def open_metadata(self) -> BinaryIO:
        """The file with the metadata."""
        return Path(self.path, METADATA_FILE).open("rb")

    def read_metadata(self, *_args: Any, **_keywords: Any) -> Metadata:
        with self.open_metadata() as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"its metadata are a {type(metadata).__name__}")
        for place in (metadata.storage_data or {}).values():
            if Path(place.relative_path).name != place.relative_path:
                raise pickle.UnpicklingError(f"it names a file elsewhere: {place.relative_path}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        torch.load(value, weights_only=True)  # refuses what torch's own planner would run
        value.seek(0)
        super().load_bytes(read_item, value)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _memory_format(owner: Any, name: str) -> Any:
    """torch pickles a tensor's memory format as getattr(_MEM_FORMAT_ENCODING, name)."""
    if owner is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it reads {name} of {owner!r:.80}")
    return _MEM_FORMAT_ENCODING[name]
