"""Checkpoints of a run: complete or absent, and of this model or refused.

A checkpoint is a directory `step_000010` with the training states of actor and critic, each written by all its ranks
(torch.distributed.checkpoint, so another number of ranks can load it), and `state.json`, which lists every file.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.errors import CheckpointError, DataError

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
FORMAT = 1
_HASHED_BYTES = 2**20


class TrainingState(BaseModel):
    """A run's state after a step. All randomness follows from seed, step and the sampler's position."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    seed: int
    sampler: dict[str, int]
    model: str
    config: dict[str, Any]
    kl_coefficient: float | None = None
    format: int = FORMAT


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    state: TrainingState
    files: dict[str, int]


def checkpoint_directory(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def last_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of the last step; None if there is none."""
    found = sorted(checkpoint_directory(run_dir, 0).parent.glob(f"step_*/{STATE_FILE}"))
    return found[-1].parent if found else None


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, under a hidden name until complete; keeps the last `keep`."""

    def __init__(self, run_dir: Path, keep: int | None = None) -> None:
        self._run_dir = run_dir
        self._keep = keep
        self._state: TrainingState | None = None

    def begin(self, state: TrainingState) -> Path:
        """A new directory for the state of each role. Removes the remains of interrupted writes.

        Raises CheckpointError.
        """
        partial = self._partial(state.step)
        with _explained(partial):
            partial.parent.mkdir(parents=True, exist_ok=True)
            for left in (*partial.parent.glob(".step_*.partial"), *partial.parent.glob(".step_*.retired")):
                shutil.rmtree(left)
            partial.mkdir()
        self._state = state
        return partial

    def complete(self) -> Path:
        """Turns the begun directory into a checkpoint; its path. On CheckpointError there is none."""
        assert self._state is not None
        state, self._state = self._state, None
        partial, directory = self._partial(state.step), checkpoint_directory(self._run_dir, state.step)
        try:
            with _explained(directory):
                manifest = _Manifest(state=state, files=_sizes(partial))
                with (partial / STATE_FILE).open("w", encoding="utf-8") as file:
                    file.write(manifest.model_dump_json(indent=2) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                if directory.exists():  # rename() replaces only empty directories
                    _remove(directory)
                partial.rename(directory)
                _sync_directory(directory.parent)
        except CheckpointError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._prune(state.step)
        return directory

    def abandon(self) -> None:
        """Removes the begun directory."""
        if self._state is not None:
            shutil.rmtree(self._partial(self._state.step), ignore_errors=True)
            self._state = None

    def _partial(self, step: int) -> Path:
        return _hidden(checkpoint_directory(self._run_dir, step), "partial")

    def _prune(self, step: int) -> None:
        """Removes all but the last checkpoints up to this step. Checkpoints of later steps, from before the run resumed
        at an earlier one, stay until this run reaches them."""
        if self._keep is None:
            return
        found = sorted(checkpoint_directory(self._run_dir, 0).parent.glob(f"step_*/{STATE_FILE}"))
        past = [file.parent for file in found if file.parent.name <= checkpoint_directory(self._run_dir, step).name]
        for directory in past[: -self._keep]:
            try:
                _remove(directory)
            except OSError as error:
                logger.warning("%s: an old checkpoint cannot be removed: %s", directory, error)


def read_checkpoint(directory: Path, model: Path, roles: Sequence[str] = ()) -> TrainingState:
    """The state of a checkpoint.

    Raises CheckpointError unless it is complete, holds these roles and belongs to the model at `model`.
    """
    hint = _hint(directory)
    manifest = _read_manifest(directory)
    if manifest.state.format != FORMAT:
        raise CheckpointError(
            f"{directory}: written in format {manifest.state.format}, this version reads {FORMAT}", hint=hint
        )
    found = _sizes(directory)
    for name, size in manifest.files.items():
        if found.get(name) != size:
            state = f"has {found[name]} bytes instead of {size}" if name in found else "is missing"
            raise CheckpointError(f"{directory}: damaged: {name} {state}", hint=hint)
    if manifest.state.model != fingerprint(model):
        raise CheckpointError(
            f"{directory}: belongs to another model than {model}",
            hint="set model.path to the model that the run started from: the reference policy is made from it",
        )
    absent = sorted(set(roles) - {name.split("/")[0] for name in manifest.files})
    if absent:
        raise CheckpointError(
            f"{directory}: holds no {' and no '.join(absent)}, which this run trains",
            hint="resume with the algorithm.advantage of the run that wrote it, or start from its exported model",
        )
    return manifest.state


def _read_manifest(directory: Path) -> _Manifest:
    hint = _hint(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such checkpoint", hint=hint)
    try:
        return _Manifest.model_validate_json((directory / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory}: not a checkpoint, it has no {STATE_FILE}", hint=hint) from error
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory / STATE_FILE}: damaged: {error}", hint=hint) from error


def checkpoint_model(directory: Path) -> Path:
    """The directory of the model that the checkpoint's run started from. Raises CheckpointError."""
    path = _read_manifest(directory).state.config.get("model", {}).get("path")
    if path is None:
        raise CheckpointError(f"{directory}: it does not name its run's model", hint="name the model with --model")
    return Path(path)


def fingerprint(model: Path) -> str:
    """A digest of a model directory: its configuration and tokenizer, and size and first MiB of each weight file."""
    digest = hashlib.sha256()
    files = [model / "config.json", model / "tokenizer.json", *sorted(model.glob("*.safetensors"))]
    try:
        for file in filter(Path.exists, files):
            with file.open("rb") as opened:
                content = opened.read(_HASHED_BYTES)
            digest.update(json.dumps([file.name, file.stat().st_size]).encode() + content)
    except OSError as error:
        raise DataError(f"{model}: cannot be read: {error}", hint="set model.path to a readable model") from error
    return digest.hexdigest()


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot be written: {error}", hint="check free space and permissions of that directory"
        ) from error


def _hidden(directory: Path, role: str) -> Path:
    return directory.with_name(f".{directory.name}.{role}")


def _remove(directory: Path) -> None:
    """Removes a checkpoint atomically: it never appears incomplete."""
    retired = _hidden(directory, "retired")
    shutil.rmtree(retired, ignore_errors=True)
    directory.rename(retired)
    shutil.rmtree(retired, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    """Makes a rename in the directory survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sizes(directory: Path) -> dict[str, int]:
    """The size of every file below a directory except the manifest."""
    return {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / STATE_FILE
    }


def _hint(directory: Path) -> str:
    complete = sorted(path.parent for path in directory.parent.glob(f"step_*/{STATE_FILE}") if path.parent != directory)
    if complete:
        return f"the last other checkpoint of that run is {complete[-1]}"
    return "name a directory like runs/RUN_ID/checkpoints/step_000010, or leave out trainer.resume to start a new run"
