"""How a run ends: its last step is saved, and the model is exported once all steps are taken."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.config.tree import WorkersConfig
from trainer.errors import CheckpointError, InterruptedRun, LostRunError, RestartError, TrainerError
from trainer.records.pages.model_card import write_model_card
from trainer.records.tracking import INTERRUPTED, Tracker
from trainer.runs.checkpoints.final_model import write_final_model
from trainer.runs.checkpoints.places import run_directories
from trainer.runs.checkpoints.saving import ROUNDS, Saver
from trainer.runs.progress import Progress
from trainer.runs.reproduction.writer import CertificateWriter
from trainer.runs.workers import TrainingGroups

logger = logging.getLogger(__name__)


class Ending:
    """Saves and exports what a run has learned."""

    def __init__(
        self,
        config: WorkersConfig,
        run_dir: Path,
        groups: TrainingGroups,
        progress: Progress,
        saver: Saver,
        tracker: Tracker,
        certificate: CertificateWriter,
    ) -> None:
        self._config, self._settings, self._run_dir, self._groups = config, config.trainer, run_dir, groups
        self._progress, self._saver, self._tracker, self._certificate = progress, saver, tracker, certificate

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
        step, model, settings = self._progress.step, self._config.model.directory, self._config.model_dump(mode="json")

        def describe(directory: Path) -> None:
            self._tracker.flush()  # the card reads the metrics
            write_model_card(directory, self._run_dir, step, model, settings)

        with self._tracker.phase("export"):
            directories = run_directories(self._settings, self._run_dir)
            timeout = self._settings.worker_timeout
            run_dir = write_final_model(self._groups.actor, directories, describe, self._saver, timeout)
        if run_dir != self._run_dir:
            logger.warning("the final model is in %s", run_dir / "model")
        self._certificate.model(step, run_dir / "model")

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
            hint = (
                f"the checkpoint of step {step} is whole: `python -m trainer export {self._run_dir}` makes the model "
                "of it"
            )
        elif last is None:
            hint = "there is no checkpoint to continue from"
            hint += ", because trainer.save_freq=0" if self._settings.save_freq == 0 else ""
        else:
            hint = f"the last checkpoint is {last}: continue from it with trainer.resume={last}"
        raise CheckpointError(f"the run took all its {step} steps, but its end is not written: {causes}", hint=hint)

    def _how_to_continue(self) -> str:
        last = self._saver.last
        return "" if last is None else f"continue with trainer.resume={last}"
