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
from trainer.runs.loop import Loop
from trainer.runs.step import Progress

Events = list[tuple[Any, ...]]


class PlayedSteps:
    """Steps that learn nothing; `fails` is called inside the update of the second one."""

    def __init__(self, fails: Callable[[], None], validate: Callable[[int], None]) -> None:
        self._fails, self._validate = fails, validate

    def take(self, number: int, progress: Progress) -> dict[str, float]:
        metrics = {"reward/mean": 0.5}
        with progress.updating(number, metrics):
            if number == 2:
                self._fails()
        return metrics

    def validate(self, number: int) -> dict[str, float]:
        self._validate(number)
        return {}

    def begin(self, resumed: TrainingState | None) -> None:
        """There is nothing to prepare."""

    def state(self) -> dict[str, Any]:
        return {"sampler": training_state(0).sampler}

    def snapshot(self) -> Callable[[], None]:
        return lambda: None


def run(
    tmp_path: Path,
    fails: Callable[[], None] = lambda: None,
    validate: Callable[[int], None] = lambda _step: None,
) -> Events:
    """Takes two steps, each of which `validate` follows; what was logged and saved, and the error."""
    events: Events = []
    steps = PlayedSteps(fails, validate)
    tracker = SimpleNamespace(
        phase=lambda _name: nullcontext(),
        begin=lambda: None,
        log=lambda step, metrics: events.append(("logged", step, metrics)),
        log_waits=lambda *_: None,
    )
    saver = SimpleNamespace(
        last=None,
        schedule=SimpleNamespace(due=lambda _step: False),
        look=dict,
        healthy=lambda: True,
        save=lambda state, *_: events.append(("saved", state.step)),
        close=lambda: None,
    )
    session: Any = SimpleNamespace(
        config=Config.model_validate({"trainer": {"test_before_training": False, "test_freq": 1}}),
        run_dir=tmp_path,
        last_step=2,
        resumed=None,
        lowered=(),
        workers=SimpleNamespace(training=SimpleNamespace(all=[])),
        tracker=tracker,
        stop=SimpleNamespace(defer=lambda: None, check=lambda: None),
        certificate=SimpleNamespace(begin=lambda: None),
        efficiency=SimpleNamespace(measured=lambda _metrics: nullcontext(), timeline=None, waiting={}),
        saver=saver,
    )
    try:
        Loop(session, steps).run()
    except TrainerError as error:
        events.append((type(error),))
    return events


def fail(error: Exception) -> Callable[..., None]:
    def raises(step: int = 2) -> None:
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
