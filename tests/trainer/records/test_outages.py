"""Records while a disk is full or a server is away."""

import errno
import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.records import retrying
from trainer.records.files.lines import LineFile
from trainer.records.retrying import RetryingLogger
from trainer.records.tensorboard import TensorBoardFile


def rows(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().split("\n")[:-1]]


def test_lines_wait_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = LineFile(tmp_path / "metrics.jsonl")
    file.append({"step": 1})
    write = os.write

    def full(descriptor: int, content: bytes) -> int:
        if len(content) < 5:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[:-4])

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "write", full)
        file.append({"step": 2})
        file.append({"step": 3})
        assert rows(tmp_path / "metrics.jsonl") == [{"step": 1}]  # and no half line
    assert caplog.text.count("No space left on device") == 1
    file.append({"step": 4})
    file.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"step": step} for step in (1, 2, 3, 4)]


def test_points_of_tensorboard_wait_while_its_directory_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, away = tmp_path / "tensorboard", tmp_path / "away"
    board = TensorBoardFile(home, None)
    board.log(1, {"reward/mean": 0.5})
    write = os.write

    def stale(descriptor: int, content: bytes) -> int:
        write(descriptor, content[:7])  # a part arrives before the server is gone
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", stale)
        board.log(2, {"reward/mean": 0.25})
    home.rename(away)
    board.log(3, {"reward/mean": 0.125})
    assert caplog.text.count("its records wait in memory: [Errno 116] Stale file handle") == 1
    away.rename(home)
    board.log(4, {"reward/mean": 1.0})
    board.close()
    assert points(home) == [(1, 0.5), (2, 0.25), (3, 0.125), (4, 1.0)]


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    for resumed, steps in ((None, (1, 2, 3)), (1, (2, 3))):
        board = TensorBoardFile(tmp_path, resumed)
        for step in steps:
            board.log(step, {"reward/mean": step / 2})
        board.close()
    assert points(tmp_path) == [(1, 0.5), (2, 1.0), (3, 1.5)]


def points(directory: Path) -> list[tuple[int, float]]:
    """The curve that TensorBoard shows."""
    events = EventAccumulator(str(directory)).Reload()
    return [(point.step, point.value) for point in events.Scalars("reward/mean")]


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "metrics.jsonl")
    file.append({"step": 1, "reward/mean": math.nan, "reference/kl": math.inf, "text": "NaN \u2028"})
    file.close()
    assert rows(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward/mean": None, "reference/kl": None, "text": "NaN \u2028"}
    ]


class Server:
    """A logger whose server is away for some attempts."""

    def __init__(self, away: int) -> None:
        self.away, self.closed = away, False
        self.steps: list[int] = []
        self.back = threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        if self.away:
            self.away -= 1
            raise ConnectionError("nobody answers")
        self.steps.append(step)
        if step == 3:
            self.back.set()

    def close(self, failed: bool) -> None:  # noqa: ARG002
        self.closed = True


def test_steps_wait_while_a_server_is_away(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(away=3)
    sender = RetryingLogger("mlflow", server, retry_seconds=0.01)
    for step in (1, 2, 3):
        sender.log(step, {})
    assert server.back.wait(10)
    sender.close(failed=False)
    assert server.steps == [1, 2, 3]
    assert server.closed
    assert caplog.text.count("mlflow: step 1 waits, it cannot be sent: nobody answers") == 1


def test_a_server_that_stays_away_does_not_hold_the_run(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(away=10**6)
    sender = RetryingLogger("mlflow", server)
    sender.log(1, {})
    sender.log(2, {})
    sender.close(failed=True)
    assert "mlflow: not all steps are sent; metrics.jsonl holds them all" in caplog.text


class SilentServer(Server):
    """A logger whose server takes the steps, and answers nothing any more when the record is ended."""

    def __init__(self) -> None:
        super().__init__(away=0)
        self.answer = threading.Event()

    def close(self, failed: bool) -> None:  # noqa: ARG002
        self.answer.wait()


def test_a_stand_in_for_a_server_that_goes_silent_holds_no_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "CLOSE_SECONDS", 0.1)
    server = SilentServer()
    sender = RetryingLogger("wandb", server)
    sender.log(1, {})
    sender.close(failed=False)
    assert "wandb: not done after 0.1 s, and left: its server may lack the last steps" in caplog.text
    assert server.steps == [1]
    server.answer.set()
