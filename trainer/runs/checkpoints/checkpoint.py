"""Checkpoints of a run: complete or absent, and of this model or refused.

A checkpoint is a directory `step_000010` with the training states of actor and critic, each written by all its ranks
(torch.distributed.checkpoint, so another number of ranks can load it), the responses that were sampled ahead, if there
are any, and `state.json`, which lists every file with its size and SHA-256.
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.config.tree import Config
from trainer.errors import CheckpointError, DataError, LoweredLimit
from trainer.records.files.atomic import (
    bytes_below,
    hidden_name,
    remove_directory,
    remove_remains,
    replace_directory,
    sync_tree,
)
from trainer.records.files.checksums import sha256
from trainer.records.files.disk import writing

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # the folder in a run's directory
STATE_FILE = "state.json"
FORMAT = 2
READABLE = (1, 2)  # format 1 has no checksums
_HASHED_BYTES = 2**20
_FOR_ROLL_BACKS = 2  # one of them may be damaged
_THREADS = 16  # that hash files, without Python's lock


class TrainingState(BaseModel):
    """A run's state after a step. All randomness follows from seed, step and the sampler's position.

    `exact_match` is that of the last validation, which says whether the run is good enough to end. `lowered` are limits
    that were lowered since the run's first step, in that order. `adapter` is the fingerprint of the adapter that the
    run started from, empty without one; earlier versions wrote none. `watched` are the values of the last steps that
    watchdogs compare with, `after_update` those of the last update that they have not seen yet; null is not finite.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    seed: int
    sampler: dict[str, int]
    model: str
    adapter: str | None = None
    config: dict[str, Any]
    kl_coefficient: float | None = None
    exact_match: float | None = None
    lowered: tuple[LoweredLimit, ...] = ()
    watched: dict[str, list[float | None]] = {}
    after_update: dict[str, float | None] = {}
    format: int = FORMAT


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    state: TrainingState
    files: dict[str, int]
    checksums: dict[str, str] = {}
    written: float = 0.0


def checkpoint_directory(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"step_{step:06d}"


def checkpoint_step(directory: Path) -> int:
    """The step of a checkpoint, by the name of its directory. Raises CheckpointError if it is another directory."""
    number = directory.name.removeprefix("step_")
    if not number.isdecimal():
        raise CheckpointError(f"{directory}: not named like a checkpoint", hint="name a directory like step_000010")
    return int(number)


def checkpoints(*run_dirs: Path) -> list[Path]:
    """The checkpoints in the directories of a run, whole or not, in the order in which they were written."""
    return _by_time(path for own in run_dirs for path in checkpoint_directory(own, 0).parent.glob("step_*"))


def last_checkpoint(
    *run_dirs: Path, below: int | None = None, counts: Callable[[Path], bool] = lambda _: True
) -> Path | None:
    """The newest checkpoint that counts and is whole, of a step below `below`; None if there is none at all. Warns of
    each newer one that it skips.

    Raises CheckpointError if no checkpoint is whole.
    """
    limit = None if below is None else checkpoint_directory(Path(), below).name
    found = [path for path in checkpoints(*run_dirs) if (limit is None or path.name < limit) and counts(path)]
    for directory in reversed(found):
        try:
            _whole(directory)
        except CheckpointError as error:
            logger.warning("skipped a checkpoint: %s", error)
        else:
            return directory
    if found:
        raise CheckpointError(
            f"{found[0].parent}: none of the {len(found)} checkpoints is whole",
            hint="restore one of them, or remove them all to start anew",
        )
    return None


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, under a hidden name until complete; keeps the last `keep`.

    With a `lag` a run may have to roll back to a checkpoint more than `lag` steps older than the newest. So the last
    two of these are kept, and the one that will be the next of them. The run must be the only writer of its directory.
    """

    def __init__(self, run_dir: Path, keep: int | None = None) -> None:
        self.run_dir = run_dir
        self._keep = keep
        self.lag: int | None = None
        self._state: TrainingState | None = None
        self._partial = Path()

    def begin(self, state: TrainingState) -> Path:
        """A new directory for the state of each role. Removes the remains of interrupted writes.

        Raises CheckpointError.
        """
        directory = checkpoint_directory(self.run_dir, state.step)
        with writing(directory):
            directory.parent.mkdir(parents=True, exist_ok=True)
            remove_remains(directory.parent, "step_*")
            self._partial = hidden_name(directory, "partial")
            self._partial.mkdir()
        self._state = state
        return self._partial

    def complete(self, checksums: Mapping[str, str]) -> Path:
        """Turns the begun directory into a checkpoint; its path. On CheckpointError there is none.

        `checksums` are the SHA-256 of the files, by their paths in the directory.
        """
        assert self._state is not None
        state, self._state = self._state, None
        directory = checkpoint_directory(self.run_dir, state.step)
        others = checkpoints(self.run_dir)
        # A clock that was set back must not make the new one the oldest.
        written = max(time.time(), _written(others[-1]) + 1e-3 if others else 0.0)
        try:
            with writing(directory):
                files = _sizes(self._partial)
                manifest = _Manifest(state=state, files=files, checksums=dict(checksums), written=written)
                (self._partial / STATE_FILE).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
                sync_tree(self._partial)
                replace_directory(self._partial, directory)
        except CheckpointError:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise
        self._prune(state.step)
        return directory

    def abandon(self) -> None:
        """Removes the begun directory."""
        if self._state is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._state = None

    def written_bytes(self) -> int:
        """The size of what was written of the begun checkpoint."""
        return bytes_below(self._partial) if self._state is not None else 0

    def _prune(self, step: int) -> None:
        """Removes all but the last checkpoints up to this step. Checkpoints of later steps, from before the run resumed
        at an earlier one, stay until this run reaches them."""
        if self._keep is None:
            return
        found = sorted(checkpoint_directory(self.run_dir, 0).parent.glob(f"step_*/{STATE_FILE}"))
        past = [file.parent for file in found if file.parent.name <= checkpoint_directory(self.run_dir, step).name]
        spared = set(past[-self._keep :])
        if self.lag is not None:
            limit = checkpoint_directory(self.run_dir, max(0, step - self.lag)).name
            old = [path for path in past if path.name < limit]
            spared.update(old[-_FOR_ROLL_BACKS:], past[len(old) :][:1])
        for directory in [path for path in past if path not in spared]:
            try:
                remove_directory(directory)
            except OSError as error:
                logger.warning("%s: an old checkpoint cannot be removed: %s", directory, error)


def read_checkpoint(directory: Path, model: Path, roles: Sequence[str] = ()) -> TrainingState:
    """The state of a checkpoint.

    Raises CheckpointError unless it is whole, holds these roles and belongs to the model at `model`.
    """
    manifest = _whole(directory, roles)
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


def read_resumed(config: Config, roles: Sequence[str]) -> TrainingState | None:
    """The state of the checkpoint that a run continues from; None if it starts anew.

    Raises CheckpointError unless the checkpoint is whole, holds these roles and belongs to the run's model and adapter.
    """
    directory = config.trainer.checkpoint
    if directory is None:
        return None
    state = read_checkpoint(directory, config.model.directory, roles)
    if state.adapter not in (None, adapter_fingerprint(config)):
        raise CheckpointError(
            f"{directory}: its run started from another adapter than actor.lora.path={config.actor.lora.path}",
            hint="set actor.lora.path to the adapter that the run started from: the reference policy is made from it",
        )
    return state


def check_whole(directory: Path) -> None:
    """Raises CheckpointError if a file is missing, shorter, longer or changed."""
    _whole(directory)


def _whole(directory: Path, roles: Sequence[str] = ()) -> _Manifest:
    """The manifest of a checkpoint, after a look at every file. Other roles than `roles` are not read; without it, all.

    Raises CheckpointError if a file is missing, shorter, longer or changed.
    """
    hint = _hint(directory)
    manifest = _read_manifest(directory)
    if manifest.state.format not in READABLE:
        raise CheckpointError(
            f"{directory}: written in format {manifest.state.format}, this version reads {FORMAT}", hint=hint
        )
    found = _sizes(directory)
    for name, size in manifest.files.items():
        if found.get(name) != size:
            state = f"has {found[name]} bytes instead of {size}" if name in found else "is missing"
            raise CheckpointError(f"{directory}: damaged: {name} {state}", hint=hint)
    wanted = [name for name in manifest.checksums if not roles or "/" not in name or name.split("/")[0] in roles]
    read = {name: manifest.checksums[name] for name in wanted}
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            sums = list(threads.map(sha256, [directory / name for name in read]))
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error}", hint=hint) from error
    for (name, expected), actual in zip(read.items(), sums, strict=True):
        if actual != expected:
            raise CheckpointError(f"{directory}: damaged: {name} changed since it was written (SHA-256)", hint=hint)
    return manifest


def _by_time(paths: Iterable[Path]) -> list[Path]:
    return sorted(filter(Path.is_dir, paths), key=lambda path: (_written(path), path.name))


def _written(directory: Path) -> float:
    """When a checkpoint was written, in seconds since 1970; earlier versions did not record it."""
    try:
        recorded = json.loads((directory / STATE_FILE).read_text(encoding="utf-8")).get("written")
        return float(recorded) if recorded else (directory / STATE_FILE).stat().st_mtime
    except (OSError, ValueError, AttributeError, TypeError):
        return directory.stat().st_mtime if directory.exists() else 0.0


def _read_manifest(directory: Path) -> _Manifest:
    hint = _hint(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such checkpoint", hint=hint)
    try:
        return _Manifest.model_validate_json((directory / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory}: not a checkpoint, it has no {STATE_FILE}", hint=hint) from error
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory / STATE_FILE}: damaged: {_in_a_line(error)}", hint=hint) from error


def _in_a_line(error: Exception) -> str:
    """The first complaint, without pydantic's excerpt of the file and address of its documentation."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return ": ".join([*map(str, first["loc"]), first["msg"]])


def checkpoint_model(directory: Path) -> Path:
    """The directory of the model that the checkpoint's run started from. Raises CheckpointError."""
    model = _read_manifest(directory).state.config.get("model")
    path = model.get("path") if isinstance(model, dict) else None
    if not isinstance(path, str):
        raise CheckpointError(f"{directory}: it does not name its run's model", hint="name the model with --model")
    return Path(path)


def fingerprint(model: Path) -> str:
    """A digest of a model's or an adapter's directory: its configuration and tokenizer, and size and first MiB of each
    weight file."""
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


def adapter_fingerprint(config: Config) -> str:
    """The fingerprint of the adapter that a run starts from; empty without one."""
    path = config.actor.lora.path
    return "" if path is None else fingerprint(path)


def _sizes(directory: Path) -> dict[str, int]:
    """The size of every file below a directory except the manifest."""
    return {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / STATE_FILE
    }


def _hint(directory: Path) -> str:
    complete = [file.parent for file in directory.parent.glob(f"step_*/{STATE_FILE}") if file.parent != directory]
    if complete:
        return f"the last other checkpoint of that run is {_by_time(complete)[-1]}"
    return "name a directory like runs/RUN_ID/checkpoints/step_000010, or leave out trainer.resume to start a new run"
