"""All responses of a step, as files and as `trainer samples` shows them."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from trainer.cli import app
from trainer.config.sections.trainer import TrajectoriesConfig
from trainer.config.tree import Config
from trainer.errors import DataError
from trainer.records import trajectories
from trainer.records.files.atomic import atomic_file
from trainer.records.pages.report import write_report
from trainer.records.tracking import Tracker
from trainer.records.trajectories import VALIDATIONS, TrajectoryWriter, read_trajectories, recorded_steps, show, text_of

PATIENCE = 60.0
REWARDS = (0.0, 1.0, 0.5, -1.0)


def row(number: int) -> dict[str, Any]:
    return {
        "prompt_index": number,
        "data_source": "here",
        "prompt": f"question {number}",
        "response": f"<b>answer {number}</b>\u2028",
        "ground_truth": text_of({"answers": [number]}),
        "reward": REWARDS[number],
        "tokens": 7,
    }


def write(directory: Path, *steps: int, **settings: Any) -> TrajectoryWriter:
    writer = TrajectoryWriter(directory, TrajectoriesConfig(**settings))
    for step in steps:
        if writer.wants(step):
            writer.write(step, lambda: [row(number) for number in range(4)])
    writer.close()
    return writer


def test_every_step_has_a_file_with_all_its_responses(tmp_path: Path) -> None:
    write(tmp_path / "run", 1, 2, 3)
    assert recorded_steps(tmp_path / "run") == [1, 2, 3]
    rows = read_trajectories(tmp_path / "run")
    assert [recorded["step"] for recorded in rows] == [3] * 4
    assert [recorded["reward"] for recorded in rows] == list(REWARDS)
    assert rows[2]["ground_truth"] == '{"answers": [2]}'
    assert rows[0]["response"] == "<b>answer 0</b>\u2028"


def test_only_the_chosen_steps_are_recorded(tmp_path: Path) -> None:
    write(tmp_path / "some", *range(1, 7), freq=3)
    assert recorded_steps(tmp_path / "some") == [3, 6]
    write(tmp_path / "none", 1, 2, freq=0)
    assert not (tmp_path / "none").exists()


def test_a_resumed_run_takes_the_later_steps_again(tmp_path: Path) -> None:
    writer = write(tmp_path, 1, 2, 3)
    writer.truncate(1)
    assert recorded_steps(tmp_path) == [1]


def test_a_full_disk_costs_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    write(tmp_path / "file", 1, 2)
    assert "trajectories cannot be written" in caplog.text


def test_all_files_are_there_once_the_records_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, flushed = threading.Event(), threading.Event()

    @contextmanager
    def slow_file(path: Path) -> Iterator[Path]:
        assert disk.wait(PATIENCE)
        with atomic_file(path) as temporary:
            yield temporary

    monkeypatch.setattr(trajectories, "atomic_file", slow_file)
    writer = TrajectoryWriter(tmp_path / "trajectories", TrajectoriesConfig())
    with Tracker(tmp_path, Config()) as tracker:
        tracker.begin()
        tracker.flush_too(writer.flush)
        for step in (1, 2, 3):
            writer.write(step, lambda: [row(0)])
        waiting = threading.Thread(target=lambda: (tracker.flush(), flushed.set()))
        waiting.start()
        assert not flushed.wait(0.2)
        disk.set()
        waiting.join(PATIENCE)
        assert recorded_steps(tmp_path / "trajectories") == [1, 2, 3]
    writer.close()


def test_a_missing_step_is_an_error_that_names_the_others(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no trajectories"):
        read_trajectories(tmp_path)
    write(tmp_path, 1, 2)
    with pytest.raises(DataError) as caught:
        read_trajectories(tmp_path, 7)
    assert caught.value.hint == "there are 2 steps from 1 to 2"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that wrote its trajectories into a directory of its own."""
    config = Config.model_validate({"trainer": {"trajectories": {"dir": str(tmp_path / "elsewhere")}}})
    with Tracker(tmp_path / "run", config) as tracker:
        tracker.begin()
        tracker.log(1, {"reward/mean": 0.1})
    write(tmp_path / "elsewhere", 1, 2)
    return tmp_path / "run"


def test_samples_shows_the_best_and_the_worst(run: Path) -> None:
    def shown(*options: str) -> str:
        return CliRunner().invoke(app, ["samples", str(run), *options], catch_exceptions=False).output

    assert shown("--best", "1", "--step", "1") == show({**row(1), "step": 1, "scores": None}) + "\n\n"
    assert "=== step 2, here, reward -1, 7 tokens\n--- prompt\nquestion 3\n--- response\n" in shown("--worst", "2")
    assert shown("--worst", "2").count("===") == 2
    assert shown().count("===") == 4


def test_samples_shows_a_validation(tmp_path: Path) -> None:
    with Tracker(tmp_path, Config()) as tracker:
        tracker.begin()
        tracker.log(0, {"validation/exact_match": 0.5})
    write(tmp_path / VALIDATIONS, 0, 5)
    for options, step in ((["--step", "0"], 0), ([], 5)):
        shown = CliRunner().invoke(app, ["samples", str(tmp_path), "--validation", *options], catch_exceptions=False)
        assert shown.output.count(f"=== step {step}, here") == 4


def test_the_report_shows_the_best_and_the_worst(run: Path) -> None:
    page = write_report(run).read_text()
    assert "Best and worst responses" in page
    assert page.index("answer 1") < page.index("answer 3")
    assert "<b>answer" not in page


def test_a_file_that_is_no_step_of_a_run_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    for name in (
        "step_x.parquet",
        "step_.parquet",
        "step_\u0663.parquet",
        "step_1.parquet",
        "step_00000000003.parquet",
    ):
        (tmp_path / name).touch()
    assert recorded_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"reward": [None]}, "rows without reward"),
        ({"reward": ["much"]}, "damaged"),
        ({"response": [b"\xb5"]}, "damaged"),
        ({"response": None}, "damaged"),
    ],
)
def test_a_file_of_other_types_is_refused(tmp_path: Path, columns: dict[str, list[object] | None], words: str) -> None:
    write(tmp_path, 1)
    (file,) = tmp_path.glob("*.parquet")
    table = pq.read_table(file)
    for name, values in columns.items():
        at = table.column_names.index(name)
        table = table.remove_column(at)
        if values is not None:
            table = table.append_column(name, pa.array(values * table.num_rows))
    pq.write_table(table, file)
    with pytest.raises(DataError, match=words):
        read_trajectories(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_of_trajectories_is_refused_and_never_waited_for(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "step_000001.parquet"
    os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    with pytest.raises(DataError, match="not a regular file"):
        read_trajectories(tmp_path)
