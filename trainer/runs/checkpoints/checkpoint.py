"""Checkpoints of a run: complete or absent, and of this model and data or refused.

A checkpoint is a directory `step_000010` with the training states of actor and critic, each written by all its ranks
(torch.distributed.checkpoint, so another number of ranks can load it), the responses that were sampled ahead, if there
are any, and its manifest.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.config.tree import WorkersConfig
from trainer.errors import CheckpointError
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
from trainer.runs.checkpoints.manifest import (
    STATE_FILE,
    Inputs,
    Manifest,
    TrainingState,
    checkpoint_name,
    describe_files,
    read_manifest,
    whole,
)
from trainer.runs.reproduction.certificate import Input, input_differences
from trainer.runs.reproduction.inputs import hashed_again, hashed_input, named_paths

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # the folder in a run's directory
_FOR_ROLL_BACKS = 2  # one of them may be damaged
_SHOWN = 3  # differing files in a message
# Frozen weights, configurations and tokenizers come from these models, whatever the checkpoint holds.
_MODEL = "model.path"
_MODELS = (_MODEL, "actor.lora.path", "critic.path", "critic.lora.path")


def checkpoint_directory(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / checkpoint_name(step)


def checkpoint_step(directory: Path) -> int:
    """The step of a checkpoint, by the name of its directory. Raises CheckpointError if it is another directory."""
    number = directory.name.removeprefix("step_")
    if not number.isdecimal():
        raise CheckpointError(f"{directory}: not named like a checkpoint", hint="name a directory like step_000010")
    return int(number)


def checkpoints(*run_dirs: Path) -> list[Path]:
    """The checkpoints in the directories of a run, whole or not, in the order in which they were written."""
    return _by_time(path for run_dir in run_dirs for path in checkpoint_directory(run_dir, 0).parent.glob("step_*"))


def last_checkpoint(
    *run_dirs: Path, below: int | None = None, counts: Callable[[Path], bool] = lambda _: True
) -> Path | None:
    """The newest checkpoint that counts and is whole, of a step below `below`; None if there is none at all. Warns of
    each newer one that it skips.

    Raises CheckpointError if no checkpoint is whole.
    """
    limit = None if below is None else checkpoint_directory(Path(), below).name
    candidates = [path for path in checkpoints(*run_dirs) if (limit is None or path.name < limit) and counts(path)]
    for directory in reversed(candidates):
        try:
            _whole(directory)
        except CheckpointError as error:
            logger.warning("skipped a checkpoint: %s", error)
        else:
            return directory
    if candidates:
        raise CheckpointError(
            f"{candidates[0].parent}: none of the {len(candidates)} checkpoints is whole",
            hint="restore one of them, or remove them all to start anew",
        )
    return None


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, under a hidden name until complete; keeps the last `keep`.

    With a `lag` a run may have to roll back to a checkpoint more than `lag` steps older than the newest. So the last
    two of these are kept, and the one that will be the next of them. The run must be the only writer of its directory.
    """

    def __init__(self, run_dir: Path, keep: int | None = None, inputs: Callable[[], Inputs] = dict) -> None:
        """`inputs` returns the files that the run started from, once a checkpoint is complete."""
        self.run_dir = run_dir
        self._keep = keep
        self._inputs = inputs
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
                files = describe_files(self._partial, checksums)
                inputs = {setting: dict(sums) for setting, sums in self._inputs().items()}
                Manifest(state=state, inputs=inputs, files=files, written=written).write(self._partial)
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
        manifests = sorted(checkpoint_directory(self.run_dir, 0).parent.glob(f"step_*/{STATE_FILE}"))
        past = [file.parent for file in manifests if file.parent.name <= checkpoint_directory(self.run_dir, step).name]
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


def read_checkpoint(directory: Path, roles: Sequence[str] = (), model: Path | None = None) -> TrainingState:
    """The state of a checkpoint.

    Raises CheckpointError unless it is whole, holds these roles and, if `model` is given, belongs to it.
    """
    manifest = _with_roles(directory, roles)
    if model is not None:
        recorded = {_MODEL: manifest.inputs.get(_MODEL, {})}
        _check_inputs(directory, recorded, {_MODEL: model})
    return manifest.state


def read_resumed(config: WorkersConfig, roles: Sequence[str]) -> TrainingState | None:
    """The state of the checkpoint that a run continues from; None if it starts anew.

    Raises CheckpointError unless the checkpoint is whole, holds these roles and belongs to the run's models and data.
    """
    directory = config.trainer.checkpoint
    if directory is None:
        return None
    manifest = _with_roles(directory, roles)
    _check_inputs(directory, manifest.inputs, starting_files(config))
    return manifest.state


def starting_files(config: WorkersConfig) -> dict[str, Path]:
    """The files and directories that a run cannot exchange once it has begun, by setting."""
    models = {name for name in _MODELS if config.needs_critic or not name.startswith("critic.")}
    return {
        setting: path
        for setting, path in named_paths(config)
        if setting in models or setting.startswith("data.train_files.")
    }


def hashed_inputs(paths: Mapping[str, Path]) -> Inputs:
    """The SHA-256 of the files that settings name; none, with a warning, if they cannot be read."""
    sums: dict[str, Mapping[str, str]] = {}
    for setting, path in paths.items():
        try:
            sums[setting] = hashed_input(path).files
        except OSError as error:
            logger.warning("%s=%s: a resumed run cannot compare it: %s", setting, path, error)
            sums[setting] = {}
    return sums


def _check_inputs(directory: Path, recorded: Inputs, paths: Mapping[str, Path]) -> None:
    """Raises CheckpointError if the files of a setting are not those that the checkpoint's run started from."""
    differences: list[str] = []
    for setting in sorted({*recorded, *paths}):
        sums = recorded.get(setting)
        if sums is None:
            differences.append(f"{setting} is set")
        elif setting not in paths:
            differences.append(f"{setting} is not set")
        elif not sums:
            logger.warning("%s: %s is not compared: it could not be read when the run began", directory, setting)
        else:
            differences += _changes(setting, paths[setting], sums)
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise CheckpointError(
            f"{directory}: belongs to another model or other data: {'; '.join(differences[:_SHOWN])}{more}",
            hint="restore what the run started from, or start a new run from its exported model (`trainer export`)",
        )


def _changes(setting: str, path: Path, sums: Mapping[str, str]) -> list[str]:
    """Each file of a setting that differs. A single file may have another name."""
    try:
        if path.is_file():
            return [] if [*sums.values()] == [sha256(path)] else [f"{setting}: {path} changed (SHA-256)"]
        recorded = Input(path=str(path), files=dict(sums))
        return input_differences({setting: recorded}, {setting: hashed_again(recorded)})
    except OSError as error:
        return [f"{setting}: {path} cannot be read: {error}"]


def check_whole(directory: Path) -> None:
    """Raises CheckpointError if a file is missing, shorter, longer or changed."""
    _whole(directory)


def checkpoint_model(directory: Path) -> Path:
    """The directory of the model that the checkpoint's run started from. Raises CheckpointError."""
    with _with_hint(directory):
        model = read_manifest(directory).state.config.get("model")
    path = model.get("path") if isinstance(model, dict) else None
    if not isinstance(path, str):
        raise CheckpointError(f"{directory}: it does not name its run's model", hint="name the model with --model")
    return Path(path)


def _with_roles(directory: Path, roles: Sequence[str]) -> Manifest:
    """The manifest of a whole checkpoint. Raises CheckpointError if it holds other roles."""
    manifest = _whole(directory, roles)
    absent = sorted(set(roles) - {name.split("/")[0] for name in manifest.files})
    if absent:
        raise CheckpointError(
            f"{directory}: holds no {' and no '.join(absent)}, which this run trains",
            hint="resume with the algorithm.advantage of the run that wrote it, or start from its exported model",
        )
    return manifest


def _whole(directory: Path, roles: Sequence[str] = ()) -> Manifest:
    with _with_hint(directory):
        return whole(directory, roles)


def _by_time(paths: Iterable[Path]) -> list[Path]:
    return sorted(filter(Path.is_dir, paths), key=lambda path: (_written(path), path.name))


def _written(directory: Path) -> float:
    """When a checkpoint was written, in seconds since 1970; of a damaged one, by its directory."""
    try:
        return read_manifest(directory).written
    except CheckpointError:
        with suppress(OSError):
            return directory.stat().st_mtime
        return 0.0


@contextmanager
def _with_hint(directory: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        error.hint = _hint(directory)
        raise


def _hint(directory: Path) -> str:
    complete = [file.parent for file in directory.parent.glob(f"step_*/{STATE_FILE}") if file.parent != directory]
    if complete:
        return f"the last other checkpoint of that run is {_by_time(complete)[-1]}"
    return "name a directory like runs/RUN_ID/checkpoints/step_000010, or leave out trainer.resume to start a new run"
