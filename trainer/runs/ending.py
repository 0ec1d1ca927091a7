"""How a run ends: its last step is saved, and the model is exported once all steps are taken."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from trainer.cluster.calls import wait_while
from trainer.cluster.workers import WorkerGroup
from trainer.errors import CheckpointError, InterruptedRun, LostRunError, RestartError, TrainerError, WorkerError
from trainer.records.files.atomic import atomic_directory, bytes_below, remove_remains
from trainer.records.files.disk import unwritable
from trainer.records.pages.model_card import write_model_card
from trainer.records.tracking import INTERRUPTED
from trainer.runs.checkpoints.places import run_directories
from trainer.runs.checkpoints.saving import RETRY_SECONDS, ROUNDS, Saver
from trainer.runs.interfaces import ActorRole
from trainer.runs.session import Session
from trainer.runs.step import Progress

logger = logging.getLogger(__name__)


class Ending:
    """Saves and exports what a run has learned."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self._session, self._progress = session, progress
        self._settings, self._saver, self._tracker = session.config.trainer, session.saver, session.tracker

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Takes the steps inside. Saves the last one, whether they end well or with an error, whose hint then says how
        to continue."""
        try:
            yield
        except LostRunError:
            raise  # the directory is no longer this run's
        except InterruptedRun as error:
            self._save()
            raise InterruptedRun(error.number, f" after step {self._progress.step}", self._how_to_continue()) from error
        except TrainerError as error:
            self._save_after_failure()
            error.hint = "; then ".join(filter(None, [error.hint, self._how_to_continue()]))
            if isinstance(error, RestartError):
                error.checkpoint = self._saver.last
                if not self._progress.settled or not self._saver.healthy():
                    self._saver.abandon()  # ranks wait for the one that failed
            raise
        except BaseException:
            self._save_after_failure()
            raise
        else:
            self._write_results()
        finally:
            self._saver.close()

    def _save(self, rounds: int = ROUNDS) -> None:
        """Writes a checkpoint of the last finished step, unless it exists or `save_freq` is 0.

        Raises CheckpointError.
        """
        if self._settings.save_freq != 0 and self._progress.step > 0:
            with self._tracker.phase("save"):
                self._saver.save(self._progress.state, rounds)

    def _save_after_failure(self) -> None:
        """Saves the last finished step of a run that fails, if the learner still holds it."""
        step = self._progress.step
        if self._progress.unlogged is not None:
            self._tracker.log(step, {**self._progress.unlogged, INTERRUPTED: 1.0})
        if not self._progress.settled:
            logger.warning("no checkpoint of step %d: it failed while it changed the weights", step + 1)
        elif self._settings.save_freq != 0 and self._saver.healthy():
            try:
                self._save(rounds=1)
            except TrainerError as error:
                logger.error("step %d is lost: %s; %s", step, error, error.hint)

    def _export(self) -> None:
        """Writes the final model, in the spare directory if the run's own cannot be written; see `write_final_model`.

        Raises CheckpointError.
        """
        step, config, of_run = self._progress.step, self._session.config, self._session.run_dir

        def describe(directory: Path) -> None:
            self._tracker.flush()  # the card reads the metrics
            write_model_card(directory, of_run, step, config.model.directory, config.model_dump(mode="json"))

        with self._tracker.phase("export"):
            actor, directories = self._session.workers.training.actor, run_directories(self._settings, of_run)
            run_dir = write_final_model(actor, directories, describe, self._saver, self._settings.worker_timeout)
        if run_dir != of_run:
            logger.warning("the final model is in %s", run_dir / "model")
        self._session.certificate.model(step, run_dir / "model")

    def _write_results(self) -> None:
        """Writes the last checkpoint and the final model, each whether or not the other can be written."""
        troubles: list[CheckpointError] = []
        for write in (self._save, self._export):
            try:
                write()
            except CheckpointError as error:
                troubles.append(error)
        if not troubles:
            return
        step, last = self._progress.step, self._saver.last
        causes = " and ".join(str(error) for error in troubles)
        if self._saver.step == step:
            export = f"`python -m trainer export {self._session.run_dir}`"
            hint = f"the checkpoint of step {step} is whole: {export} makes the model of it"
        elif last is None:
            hint = "there is no checkpoint to continue from"
            hint += ", because trainer.save_freq=0" if self._settings.save_freq == 0 else ""
        else:
            hint = f"the last checkpoint is {last}: continue from it with trainer.resume={last}"
        raise CheckpointError(f"the run took all its {step} steps, but its end is not written: {causes}", hint=hint)

    def _how_to_continue(self) -> str:
        last = self._saver.last
        return "" if last is None else f"continue with trainer.resume={last}"


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
