"""The loop of every run, with nothing behind it."""

from types import SimpleNamespace

from tests.training_state import training_state
from trainer.config.sections.trainer import TrainerConfig
from trainer.runs.loop import TrainingRun


class FailedRun(TrainingRun):
    """A run that fails after the update of its second step, before the validation."""

    def __init__(self, logged: list[tuple[int, dict[str, float]]]) -> None:
        self._settings = TrainerConfig()
        self.tracker = SimpleNamespace(log=lambda *row: logged.append(row))  # type: ignore[assignment]
        self.saver = SimpleNamespace(healthy=lambda: False)  # type: ignore[assignment]
        self.progress = training_state(2)
        self._settled, self._unlogged = True, {"reward/mean": 0.5}


def test_the_row_of_a_step_that_did_not_end_says_so() -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    FailedRun(logged)._save_before_ending()
    assert logged == [(2, {"reward/mean": 0.5, "trainer/interrupted": 1.0})]
