"""Checkpoints written during training. A fake group in this process stands in for workers with a slow or full disk."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training_state import training_state
from trainer.config.sections.trainer import TrainerConfig
from trainer.errors import CheckpointError, WorkerError
from trainer.records.files.checksums import sha256
from trainer.runs.checkpoints import saving
from trainer.runs.checkpoints.checkpoint import last_checkpoint
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.checkpoints.saving import RETRY_SECONDS, Saver, SaveSchedule


class FakeGroup:
    """Writes a file only when it is polled, like slow workers; `growth` bytes at each look."""

    timeout = 10.0

    def __init__(self, role: str) -> None:
        self.role = role
        self.slow = 0  # looks until its next checkpoint is written
        self.left = 0
        self.growth = 8
        self.trouble: Exception | None = None
        self.full: Path | None = None
        self.directory = Path()

    def start(self, method: Callable[..., Any], *arguments: Any) -> list[Callable[[], Any]]:
        return [lambda: getattr(self, method.__name__)(*arguments)]

    def call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [getattr(self, method.__name__)(*arguments)]

    def start_save(self, directory: Path) -> None:
        self.directory = directory
        self.left, self.slow = self.slow, 0
        directory.mkdir()

    def saving(self) -> bool:
        return self.left > 0

    def finish_save(self, _seconds: float) -> dict[str, str] | None:
        if self.trouble is not None:
            raise self.trouble
        if self.full is not None and self.directory.is_relative_to(self.full):
            raise CheckpointError(f"{self.directory}: no space left on device")
        file = self.directory / "__0_0.distcp"
        if self.left:
            self.left -= 1
            file.write_bytes(bytes((file.stat().st_size if file.exists() else 0) + self.growth))
            return None
        file.write_bytes(b"12345678")
        return {file.name: sha256(file)}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[FakeGroup]:
    monkeypatch.setattr(saving, "wait", lambda calls, _seconds: [call() for call in calls])
    return [FakeGroup("actor"), FakeGroup("critic")]


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def saver(groups: list[FakeGroup], tmp_path: Path, clock: Clock, pauses: list[float]) -> Saver:
    schedule = SaveSchedule(TrainerConfig(), clock)
    return Saver(groups, [tmp_path / "run", tmp_path / "spare"], 2, schedule, pauses.append)  # type: ignore[arg-type]


def state(step: int) -> TrainingState:
    return training_state(step)


def there(run_dir: Path) -> list[str]:
    """What lies beside the checkpoints, without the unique part of hidden names."""
    return sorted(re.sub(r"\.\w{12}\.", ".", path.name) for path in (run_dir / "checkpoints").iterdir())


def test_a_checkpoint_appears_when_every_worker_has_written(
    saver: Saver, groups: list[FakeGroup], tmp_path: Path
) -> None:
    groups[1].slow = 1
    saver.begin(state(1))
    assert saver.look() == {}
    assert there(tmp_path / "run") == [".step_000001.partial"]
    assert saver.last is None
    saver.look()
    assert there(tmp_path / "run") == ["step_000001"]
    assert (saver.last, saver.step) == (tmp_path / "run" / "checkpoints" / "step_000001", 1)
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step_000001" / "state.json").read_text())
    assert sorted(manifest["files"]) == ["actor/__0_0.distcp", "critic/__0_0.distcp"]
    assert saver.look() == {}  # nothing is under way any more


def test_a_last_checkpoint_that_was_removed_is_written_again(saver: Saver, tmp_path: Path) -> None:
    saver.save(state(3))
    shutil.rmtree(tmp_path / "run")
    saver.save(state(3))
    assert there(tmp_path / "run") == ["step_000003"]
    assert last_checkpoint(tmp_path / "run") == saver.last


def test_no_checkpoint_stands_before_the_records_of_its_steps(groups: list[FakeGroup], tmp_path: Path) -> None:
    stood: list[list[str]] = []
    run_dir = tmp_path / "run"
    schedule = SaveSchedule(TrainerConfig())
    saver = Saver(groups, [run_dir], 2, schedule, flush_records=lambda: stood.append(there(run_dir)))  # type: ignore[arg-type]
    saver.begin(state(1))
    saver.look()
    assert stood == [[".step_000001.partial"]]
    assert there(run_dir) == ["step_000001"]


def test_a_slow_save_delays_the_next_one_and_not_the_run(
    saver: Saver, groups: list[FakeGroup], tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    groups[0].slow = 3
    saver.begin(state(1))
    saver.begin(state(2))
    assert "checkpoint of step 1 is still being written, so that of step 2 waits" in caplog.text
    assert saver.look() == {"checkpoint/postponed": 1.0}
    clock.now += 60
    assert saver.schedule.due(3)  # not only after another quarter of an hour
    saver.look()
    saver.look()
    saver.begin(state(3))
    saver.look()
    assert there(tmp_path / "run") == ["step_000001", "step_000003"]


def test_a_save_that_fails_is_counted_and_tried_again_elsewhere(
    saver: Saver, groups: list[FakeGroup], tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    saver.begin(state(1))
    saver.look()
    groups[0].full = tmp_path / "run"
    saver.begin(state(2))
    assert saver.look() == {"checkpoint/failed": 1.0}
    assert f"the last one is {tmp_path / 'run'}" in caplog.text
    assert saver.look() == {}
    assert there(tmp_path / "run") == ["step_000001"]
    assert not saver.schedule.due(2)
    clock.now += RETRY_SECONDS
    assert saver.schedule.due(3)
    saver.begin(state(3))
    saver.look()
    assert there(tmp_path / "spare") == ["step_000003"]
    assert last_checkpoint(tmp_path / "run", tmp_path / "spare") == saver.last
    assert saver.before(3) == tmp_path / "run" / "checkpoints" / "step_000001"


def test_a_roll_back_never_returns_to_steps_that_the_run_takes_anew(saver: Saver, tmp_path: Path) -> None:
    for step in (1, 2):
        saver.begin(state(step))
        saver.look()
    resumed = Saver([FakeGroup("actor")], [tmp_path / "run"], None, saver.schedule)  # type: ignore[list-item]
    resumed.resume(tmp_path / "run" / "checkpoints" / "step_000001", 1)
    assert resumed.before(4) == tmp_path / "run" / "checkpoints" / "step_000001"
    for step in (2, 3):  # another step 2
        resumed.begin(state(step))
        resumed.look()
    assert [resumed.before(step) for step in (3, 4)] == [
        tmp_path / "run" / "checkpoints" / f"step_00000{step}" for step in (2, 3)
    ]


def test_a_directory_that_cannot_be_made_is_a_failed_save(saver: Saver, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a directory should be")
    saver.begin(state(1))
    assert saver.look() == {"checkpoint/failed": 1.0}


def test_the_last_checkpoint_is_tried_everywhere_and_again(
    saver: Saver, groups: list[FakeGroup], tmp_path: Path, pauses: list[float]
) -> None:
    groups[0].full = tmp_path
    with pytest.raises(CheckpointError, match="no space left"):
        saver.save(state(4))
    assert saver.look() == {"checkpoint/failed": 6.0}  # three rounds, two directories
    assert pauses == [RETRY_SECONDS] * 2
    groups[0].full = None
    saver.save(state(4))
    saver.save(state(4))  # exists
    assert saver.step == 4


def test_the_last_checkpoint_may_take_its_time_as_long_as_it_grows(saver: Saver, groups: list[FakeGroup]) -> None:
    groups[1].slow = 1000
    saver.save(state(4))
    assert saver.step == 4


def test_a_last_checkpoint_that_stops_growing_is_given_up(saver: Saver, groups: list[FakeGroup]) -> None:
    groups[1].slow, groups[1].growth = 10**6, 0
    with pytest.raises(CheckpointError, match=r"a rank is still writing a checkpoint that was given up"):
        saver.save(state(4))
    groups[1].left = 0
    saver.save(state(4))
    assert saver.step == 4


def test_a_failed_run_completes_or_removes_its_pending_checkpoint(
    saver: Saver, groups: list[FakeGroup], tmp_path: Path
) -> None:
    saver.begin(state(1))
    saver.close()
    assert there(tmp_path / "run") == ["step_000001"]
    saver.begin(state(2))
    groups[1].trouble = WorkerError("critic rank 0 died")
    saver.close()
    assert there(tmp_path / "run") == ["step_000001"]


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ({}, [15, 30, 45]),
        ({"save_minutes": 20}, [20, 40]),
        ({"save_minutes": 0}, []),
        ({"save_freq": 7}, [7, 14, 21, 28, 35, 42]),
        ({"save_freq": 25, "save_minutes": 20}, [20, 25, 45]),  # the time counts from the last save
        ({"save_freq": 0}, []),
    ],
)
def test_saves_are_due_by_steps_and_by_time(clock: Clock, settings: dict[str, float], due: list[int]) -> None:
    schedule = SaveSchedule(TrainerConfig.model_validate(settings), clock)
    saved = []
    for step in range(1, 46):  # a minute each
        clock.now += 60
        if schedule.due(step):
            saved.append(step)
            schedule.started()
    assert saved == due


def test_never_and_by_time_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"save_freq=0 never saves, but save_minutes=5 is given"):
        TrainerConfig(save_freq=0, save_minutes=5)
