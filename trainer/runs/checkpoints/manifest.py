"""`state.json` of a checkpoint: the run's state, the files that the run started from, and the checkpoint's files.

It holds its own SHA-256 and that of each file, so one digest covers all that a resumed run reads.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trainer.data.dataset import SamplerState
from trainer.errors import CheckpointError, LoweredLimit
from trainer.records.files.checksums import sha256
from trainer.records.files.regular import regular_files
from trainer.records.files.sealed import read_sealed, sealed

STATE_FILE = "state.json"
_THREADS = 16  # that hash files, without Python's lock

Inputs = Mapping[str, Mapping[str, str]]
"""The SHA-256 of each file that a setting names, by the setting and the file's path below it."""


def _of_micro_batches(limit: LoweredLimit) -> LoweredLimit:
    role, _, name = limit.setting.partition(".")
    if role not in ("actor", "critic") or name not in ("micro_batch_size", "micro_batch_tokens") or limit.after < 1:
        raise ValueError(f"{limit.setting:.80} is no limit of micro-batches")
    return limit


Finite = Annotated[float, Field(allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TrainingState(_Part):
    """A run's state after a step. All randomness follows from seed, step and the sampler's position.

    `exact_match` is that of the last validation, which says whether the run is good enough to end. `lowered` are limits
    that were lowered since the run's first step, in that order. `watched` are the values of the last steps that
    watchdogs compare with, `after_update` those of the last update that they have not seen yet; null is not finite.
    """

    step: Annotated[int, Field(ge=0)]
    seed: int
    sampler: SamplerState
    config: dict[str, Any]
    kl_coefficient: Annotated[Finite, Field(ge=0)] | None = None
    exact_match: Finite | None = None
    lowered: tuple[Annotated[LoweredLimit, AfterValidator(_of_micro_batches)], ...] = ()
    watched: dict[str, list[float | None]] = {}
    after_update: dict[str, float | None] = {}


class StoredFile(_Part):
    """Size in bytes and SHA-256 of a checkpoint's file."""

    size: Annotated[int, Field(ge=0)]
    sha256: Sha256


class Manifest(_Part):
    """What `state.json` holds. `files` are by their paths in the checkpoint, `written` is in seconds since 1970."""

    format: Literal[3] = 3
    written: Annotated[Finite, Field(ge=0)]
    state: TrainingState
    inputs: dict[str, dict[str, Sha256]]
    files: dict[str, StoredFile]

    def write(self, directory: Path) -> None:
        """Raises OSError."""
        (directory / STATE_FILE).write_text(sealed(self), encoding="utf-8")


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError if there is none, or if it changed."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such checkpoint")
    file = directory / STATE_FILE
    try:
        manifest = read_sealed(Manifest, file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory}: not a checkpoint, it has no {STATE_FILE}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: damaged: {error}") from error
    named = directory.name
    if named.startswith("step_") and named != checkpoint_name(manifest.state.step):
        raise CheckpointError(f"{file}: of step {manifest.state.step}, in a directory of another step")
    return manifest


def whole(directory: Path, roles: Sequence[str] = ()) -> Manifest:
    """The manifest of a checkpoint, after a look at every file. Of roles, only `roles` are read; without it, all.

    Raises CheckpointError if a file is missing, shorter, longer, changed, or no regular file below the directory.
    """
    manifest = read_manifest(directory)
    try:
        sizes = regular_files(directory)
        for name, file in manifest.files.items():
            if sizes.get(name) != file.size:
                state = f"has {sizes[name]} bytes instead of {file.size}" if name in sizes else "is missing"
                raise CheckpointError(f"{directory}: damaged: {name} {state}")
        names = [name for name in manifest.files if not roles or "/" not in name or name.split("/")[0] in roles]
        with ThreadPoolExecutor(_THREADS) as threads:
            sums = list(threads.map(sha256, [directory / name for name in names]))
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error}") from error
    for name, actual in zip(names, sums, strict=True):
        if actual != manifest.files[name].sha256:
            raise CheckpointError(f"{directory}: damaged: {name} changed since it was written (SHA-256)")
    return manifest


def describe_files(directory: Path, checksums: Mapping[str, str]) -> dict[str, StoredFile]:
    """The files of a new checkpoint. `checksums` are those that the writers know. Raises OSError."""
    return {
        name: StoredFile(size=size, sha256=checksums.get(name) or sha256(directory / name))
        for name, size in regular_files(directory).items()
    }
