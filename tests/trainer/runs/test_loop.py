"""The loop of every run and how it ends, with played steps and nothing behind them."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training_state import training_state
from trainer.config.tree import Config
from trainer.errors import TrainerError, WatchdogError, WorkerError
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.ending import Ending
from trainer.runs.loop import Loop
from trainer.runs.progress import Progress

Events = list[tuple[Any, ...]]


class PlayedSteps:
    """Steps that learn nothing; `fails` is called inside the update of the second one."""

    def __init__(self, fails: Callable[[], None]) -> None:
        self._fails = fails

    def take(self, number: int, progress: Progress) -> dict[str, float]:
        metrics = {"reward/mean": 0.5}
        with progress.updating(number, metrics):
            if number == 2:
                self._fails()
        return metrics

    def validate(self, _number: int) -> dict[str, float]:
        return {}

    def begin(self, resumed: TrainingState | None) -> None:
        """There is nothing to prepare."""

    def state(self) -> dict[str, Any]:
        return {}

    def snapshot(self) -> Callable[[], None]:
        return lambda: None


def run(
    tmp_path: Path,
    fails: Callable[[], None] = lambda: None,
    validate: Callable[[int, dict[str, float]], None] = lambda _step, _metrics: None,
    recovery: Any = None,
) -> Events:
    """Takes two steps, of which `validate` follows each; what was logged and saved, and the error."""
    events: Events = []
    config: Any = Config.model_validate({"trainer": {"test_before_training": False}})
    stop: Any = SimpleNamespace(defer=lambda: None, check=lambda: None)
    tracker: Any = SimpleNamespace(
        phase=lambda _name: nullcontext(), log=lambda step, metrics: events.append(("logged", step, metrics))
    )
    saver: Any = SimpleNamespace(
        last=None, healthy=lambda: True, save=lambda state, *_: events.append(("saved", state.step)), close=lambda: None
    )
    efficiency: Any = SimpleNamespace(measured=lambda _metrics: nullcontext(), timeline=None)
    progress = Progress(training_state, stop, tmp_path)

    def record(step: int, metrics: dict[str, float]) -> None:
        tracker.log(step, metrics)
        progress.logged()

    unused: Any = None
    loop = Loop(
        config.trainer,
        PlayedSteps(fails),
        2,
        progress,
        tracker=tracker,
        stop=stop,
        efficiency=efficiency,
        traced=lambda _step: nullcontext(),
        observers=[progress.finish, validate, record],
        recovery=recovery(progress) if recovery else None,
        ending=Ending(config, tmp_path, unused, progress, saver, tracker, unused),
    )
    try:
        loop.run()
    except TrainerError as error:
        events.append((type(error),))
    return events


def fail(error: Exception) -> Callable[..., None]:
    def raises(step: int = 2, _metrics: object = None) -> None:
        if step == 2:
            raise error

    return raises


FIRST = ("logged", 1, {"reward/mean": 0.5})


def test_the_row_of_a_step_that_did_not_end_says_so(tmp_path: Path) -> None:
    events = run(tmp_path, validate=fail(WorkerError("an engine died")))
    interrupted = {"reward/mean": 0.5, "trainer/interrupted": 1.0}
    assert events == [FIRST, ("logged", 2, interrupted), ("saved", 2), (WorkerError,)]


def test_a_run_that_fails_while_it_changes_the_weights_saves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(tmp_path, fail(WorkerError("the actor died"))) == [FIRST, (WorkerError,)]
    assert "no checkpoint of step 2: it failed while it changed the weights" in caplog.text


def test_a_run_that_a_watchdog_stops_saves_its_last_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(tmp_path, fail(WatchdogError("watchdog kl"))) == [FIRST, ("saved", 1), (WatchdogError,)]
    assert "it failed while it changed the weights" not in caplog.text


def test_a_step_is_taken_again_after_a_recovery(tmp_path: Path) -> None:
    errors = [WorkerError("the actor died")]

    def fails() -> None:
        if errors:
            raise errors.pop()

    class Recovery:
        def __init__(self, progress: Progress) -> None:
            self._progress = progress

        def recover(self, _error: WorkerError) -> None:
            self._progress.return_to(training_state(1))

    events = run(tmp_path, fails, validate=fail(WatchdogError("ends the run")), recovery=Recovery)
    assert [event[:2] for event in events] == [("logged", 1), ("logged", 2), ("saved", 2), (WatchdogError,)]
