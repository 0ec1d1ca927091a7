"""Checkpoints of a run: complete or absent, and of this model or refused.

A checkpoint is a directory `step_000010` with the training states of actor and critic, each written by all its ranks
(torch.distributed.checkpoint, so another number of ranks can load it), and `state.json`, which lists every file.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.atomic import atomic_directory
from trainer.errors import CheckpointError, DataError

STATE_FILE = "state.json"
FORMAT = 1
_HASHED_BYTES = 2**20


class TrainingState(BaseModel):
    """Where a run stands after a step. All randomness follows from seed, step and the sampler's place."""

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


@contextmanager
def new_checkpoint(directory: Path, state: TrainingState) -> Iterator[Path]:
    """Yields a directory to fill, which becomes `directory` when the block succeeds. Raises CheckpointError."""
    try:
        with atomic_directory(directory) as partial:
            yield partial
            manifest = _Manifest(state=state, files=_sizes(partial))
            (partial / STATE_FILE).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot be written: {error}", hint="check free space and permissions of that directory"
        ) from error


def read_checkpoint(directory: Path, model: Path) -> TrainingState:
    """The state of a checkpoint whose files are all there and whose model is the one at `model`.

    Raises CheckpointError otherwise.
    """
    hint = _hint(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such checkpoint", hint=hint)
    try:
        manifest = _Manifest.model_validate_json((directory / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory}: not a checkpoint, it has no {STATE_FILE}", hint=hint) from error
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory / STATE_FILE}: damaged: {error}", hint=hint) from error
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
    return manifest.state


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


def _sizes(directory: Path) -> dict[str, int]:
    """Every file below a directory but the manifest, with its size."""
    return {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / STATE_FILE
    }


def _hint(directory: Path) -> str:
    complete = sorted(path.parent for path in directory.parent.glob(f"step_*/{STATE_FILE}") if path.parent != directory)
    if complete:
        return f"the last other checkpoint of that run is {complete[-1]}"
    return "name a directory like runs/RUN_ID/checkpoints/step_000010, or leave trainer.resume out to start anew"
