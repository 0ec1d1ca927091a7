"""Checkpoints written during training. A fake group in this process stands in for workers with a slow or full disk."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import CheckpointError, WorkerError
from trainer.records.checksums import sha256
from trainer.runs import saving
from trainer.runs.checkpoint import TrainingState
from trainer.runs.saving import Saver


class FakeGroup:
    """Writes a file only when it is polled, like slow workers."""

    timeout = 60.0

    def __init__(self, role: str) -> None:
        self.role = role
        self.slow = False
        self.trouble: Exception | None = None
        self.directory = Path()

    def start(self, method: Callable[..., Any], *arguments: Any) -> list[Callable[[], Any]]:
        return [lambda: getattr(self, method.__name__)(*arguments)]

    def call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [getattr(self, method.__name__)(*arguments)]

    def start_save(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def saving(self) -> bool:
        return self.slow

    def finish_save(self) -> dict[str, str]:
        if self.trouble is not None:
            raise self.trouble
        file = self.directory / "__0_0.distcp"
        file.write_bytes(b"12345678")
        return {file.name: sha256(file)}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[FakeGroup]:
    monkeypatch.setattr(saving, "wait", lambda calls, _seconds: [call() for call in calls])
    return [FakeGroup("actor"), FakeGroup("critic")]


@pytest.fixture
def saver(groups: list[FakeGroup], tmp_path: Path) -> Saver:
    return Saver(groups, tmp_path / "run", keep=2)  # type: ignore[arg-type]


def state(step: int) -> TrainingState:
    return TrainingState(step=step, seed=0, sampler={}, model="", config={})


def there(tmp_path: Path) -> list[str]:
    """What lies beside the checkpoints, without the unique part of hidden names."""
    return sorted(re.sub(r"\.\w{12}\.", ".", path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())


def test_a_checkpoint_appears_when_every_worker_has_written(
    saver: Saver, groups: list[FakeGroup], tmp_path: Path
) -> None:
    groups[1].slow = True
    saver.start(state(1))
    saver.look()
    assert there(tmp_path) == [".step_000001.partial"]
    assert saver.last is None
    groups[1].slow = False
    saver.look()
    assert there(tmp_path) == ["step_000001"]
    assert (saver.last, saver.step) == (tmp_path / "run" / "checkpoints" / "step_000001", 1)
    saver.look()  # nothing is under way any more


def test_a_save_that_fails_keeps_the_old_checkpoint_and_the_next_one_is_tried(
    saver: Saver, groups: list[FakeGroup], tmp_path: Path
) -> None:
    saver.start(state(1))
    saver.finish()
    groups[0].trouble = CheckpointError("no space left on device")
    saver.start(state(2))
    with pytest.raises(CheckpointError, match="no space left"):
        saver.look()
    assert there(tmp_path) == ["step_000001"]
    assert saver.step == 1
    groups[0].trouble = None
    saver.start(state(3))
    saver.finish()
    assert there(tmp_path) == ["step_000001", "step_000003"]


def test_a_failed_run_completes_or_removes_its_pending_checkpoint(
    saver: Saver, groups: list[FakeGroup], tmp_path: Path
) -> None:
    saver.start(state(1))
    saver.close()
    assert there(tmp_path) == ["step_000001"]
    saver.start(state(2))
    groups[1].trouble = WorkerError("critic rank 0 died")
    saver.close()
    assert there(tmp_path) == ["step_000001"]


def test_a_failed_checkpoint_is_a_warning(
    saver: Saver, groups: list[FakeGroup], caplog: pytest.LogCaptureFixture
) -> None:
    groups[0].trouble = CheckpointError("the disk is full", hint="make room")
    saver.start(state(1))
    with caplog.at_level(logging.WARNING):
        assert saver.attempt(saver.look) == {"checkpoint/failed": 1.0}
    assert "no checkpoint: the disk is full; make room; the last one is None" in caplog.text
    assert saver.attempt(saver.look) == {}
