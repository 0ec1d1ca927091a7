"""The model at the end of a run, written by the actor's ranks."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from trainer.cluster.calls import wait_while
from trainer.cluster.workers import WorkerGroup
from trainer.errors import CheckpointError, WorkerError
from trainer.records.files.atomic import atomic_directory, bytes_below, remove_remains
from trainer.records.files.disk import unwritable
from trainer.runs.checkpoints.saving import RETRY_SECONDS, ROUNDS, Saver
from trainer.runs.interfaces import ActorRole

logger = logging.getLogger(__name__)


def write_final_model(
    actor: WorkerGroup[ActorRole],
    run_directories: Sequence[Path],
    describe: Callable[[Path], None],
    saver: Saver,
    timeout: float,
) -> Path:
    """Writes the policy as a model directory that Transformers and vLLM can load, in the first of the directories that
    can be written; that directory. Tries each of them several times. `describe` adds the model card. `timeout`, in
    seconds, is that of workers that write nothing.

    Raises CheckpointError.
    """
    for attempt in range(1, ROUNDS + 1):
        for run_dir in run_directories:
            try:
                remove_remains(run_dir, "model.*")
                with atomic_directory(run_dir / "model") as directory:
                    wait_while(actor.start(ActorRole.export, directory), timeout, partial(bytes_below, directory))
                    describe(directory)
            except (OSError, CheckpointError, WorkerError) as error:
                refused = isinstance(error, CheckpointError)
                failure = error if refused else unwritable(run_dir / "model", str(error))
                logger.warning("%s", failure)
                if not saver.healthy():
                    raise failure from error
            else:
                return run_dir
        if attempt < ROUNDS:
            saver.pause(RETRY_SECONDS)
    raise failure
