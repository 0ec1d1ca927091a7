"""Which directory is a run's own, and what of its records a resumed run keeps."""

from pathlib import Path
from typing import Any

import pytest

from tests.training_state import training_state
from trainer.config.sections.trainer import TrainerConfig
from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.records.tracking import METRICS, Tracker
from trainer.runs.checkpoints.places import recorded_step, run_directory

STATE = training_state(2)


def settings(tmp_path: Path, **given: Any) -> TrainerConfig:
    return TrainerConfig(output_dir=tmp_path / "runs", **given)


def checkpoint(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "step_000002"


def test_a_resumed_run_goes_on_in_its_own_directory(tmp_path: Path) -> None:
    first = tmp_path / "elsewhere" / "first"
    resumed = settings(tmp_path, resume=checkpoint(first))
    assert run_directory(resumed) == first
    assert recorded_step(resumed, first, STATE) == 2


def test_a_run_with_a_name_continues_another_run_s_checkpoint_as_a_new_run(tmp_path: Path) -> None:
    named = settings(tmp_path, resume=checkpoint(tmp_path / "runs" / "first"), run_id="second")
    run_dir = run_directory(named)
    assert run_dir == tmp_path / "runs" / "second"
    assert recorded_step(named, run_dir, STATE) is None  # a second run that has records is never cut


def test_a_run_that_restarts_from_another_run_s_checkpoint_records_its_own_steps_again(tmp_path: Path) -> None:
    named = settings(tmp_path, resume=checkpoint(tmp_path / "runs" / "first"), run_id="second")
    run_dir = run_directory(named)
    assert recorded_step(named, run_dir, STATE, again=True) == 2
    run_dir.mkdir(parents=True)
    rows = [f'{{"step": {step}}}\n' for step in (1, 2, 3)]
    (run_dir / METRICS).write_text("".join(rows))
    config = Config(trainer=named)
    with Tracker(run_dir, config, recorded_step(named, run_dir, STATE, again=True)) as tracker:
        tracker.begin()
    assert (run_dir / METRICS).read_text() == "".join(rows[:2])


def test_a_run_that_restarts_without_a_checkpoint_records_every_step_again(tmp_path: Path) -> None:
    assert recorded_step(settings(tmp_path, resume="auto", run_id="run"), tmp_path / "runs" / "run", None, True) == -1


def test_a_checkpoint_in_the_spare_directory_belongs_to_the_run_of_its_name(tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    resumed = settings(tmp_path, resume=checkpoint(spare / "first"), spare_dir=spare)
    run_dir = run_directory(resumed)
    assert run_dir == tmp_path / "runs" / "first"
    assert recorded_step(resumed, run_dir, STATE) == 2


def test_a_checkpoint_that_was_moved_makes_no_folder_a_run_s(tmp_path: Path) -> None:
    moved = settings(tmp_path, resume=tmp_path / "saved" / "step_000002")
    with pytest.raises(ConfigError, match="not in the checkpoints folder of a run") as caught:
        run_directory(moved)
    assert "trainer.run_id" in str(caught.value.hint)


@pytest.mark.parametrize("resume", ["auto", "a checkpoint"])
def test_a_validation_has_a_directory_of_its_own(tmp_path: Path, resume: str) -> None:
    first = tmp_path / "runs" / "first"
    given = {"resume": "auto", "run_id": "first"} if resume == "auto" else {"resume": checkpoint(first)}
    measuring = settings(tmp_path, validate_only=True, **given)
    run_dir = run_directory(measuring)
    assert run_dir.parent == tmp_path / "runs"
    assert run_dir != first
    assert recorded_step(measuring, run_dir, STATE) is None


def test_an_empty_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        settings(tmp_path, run_id="", resume="auto")
