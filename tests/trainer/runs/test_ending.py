"""The model at the end of a run. A fake group in this process stands in for an actor whose disk is full."""

from pathlib import Path
from typing import Any

import pytest

from trainer.errors import CheckpointError
from trainer.runs import ending
from trainer.runs.checkpoints.saving import RETRY_SECONDS
from trainer.runs.ending import write_final_model


class FakeSaver:
    """Notes its pauses."""

    def __init__(self, healthy: bool = True) -> None:
        self.pauses: list[float] = []
        self._healthy = healthy

    def healthy(self) -> bool:
        return self._healthy

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


class FakeActor:
    """Writes a model, except in run directories whose name contains `refusing`."""

    def __init__(self, refusing: str) -> None:
        self.asked: list[str] = []
        self._refusing = refusing

    def start(self, _method: object, directory: Path) -> list[object]:
        self.asked.append(directory.parent.name)
        if self._refusing in directory.parent.name:
            raise OSError(28, "No space left on device")
        (directory / "config.json").write_text("{}")
        return []


@pytest.fixture(autouse=True)
def no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "wait_while", lambda *_: [])


def write(actor: FakeActor, saver: FakeSaver, *run_directories: Path) -> Path:
    for directory in run_directories:
        directory.mkdir()
    given: Any = actor, run_directories, lambda directory: (directory / "README.md").write_text("card"), saver, 1.0
    return write_final_model(*given)


def test_the_spare_directory_gets_the_model_that_the_runs_own_refuses(tmp_path: Path) -> None:
    saver = FakeSaver()
    assert write(FakeActor("own"), saver, tmp_path / "own", tmp_path / "spare") == tmp_path / "spare"
    assert {path.name for path in (tmp_path / "spare" / "model").iterdir()} == {"config.json", "README.md"}
    assert [*(tmp_path / "own").iterdir()] == []
    assert saver.pauses == []


def test_every_directory_is_tried_three_times_with_pauses_between_the_rounds(tmp_path: Path) -> None:
    actor, saver = FakeActor(""), FakeSaver()
    with pytest.raises(CheckpointError, match=r"spare/model: cannot be written: .*No space left"):
        write(actor, saver, tmp_path / "own", tmp_path / "spare")
    assert actor.asked == ["own", "spare"] * 3
    assert saver.pauses == [RETRY_SECONDS] * 2


def test_ranks_that_do_not_answer_end_the_attempts(tmp_path: Path) -> None:
    actor, saver = FakeActor(""), FakeSaver(healthy=False)
    with pytest.raises(CheckpointError, match="own/model: cannot be written"):
        write(actor, saver, tmp_path / "own", tmp_path / "spare")
    assert actor.asked == ["own"]
    assert saver.pauses == []
