"""Records are read line by line; what is none is left out and named, by every reader and a resumed run."""

import io
import json
import logging
import math
import os
from pathlib import Path

import pytest
from rich.console import Console

from trainer.config.tree import Config
from trainer.errors import CheckpointError, DataError
from trainer.records.files import records
from trainer.records.files.records import METRICS_ROWS, SAMPLE_ROWS, WAITS_ROWS, read_records
from trainer.records.files.run_files import median
from trainer.records.pages.comparison import write_comparison
from trainer.records.pages.report import write_report
from trainer.records.top import watch
from trainer.records.tracking import Sample, Tracker

FILES = ("metrics.jsonl", "samples.jsonl", "waits.jsonl")


def record(run_dir: Path, steps: range, resumed: int | None = None) -> None:
    with Tracker(run_dir, Config(), resumed) as tracker:
        tracker.begin()
        for step in steps:
            tracker.log_samples(step, [Sample("1 + 1?", f"response {step}", "2", 1.0)])
            tracker.log_waits(step, {"rollout": (1.0, "rollout rank 3 on n4")})
            tracker.log(step, {"reward/mean": step / 10, "time/step": 1.0})


def insert(file: Path, line: bytes, number: int) -> None:
    """Puts a line before the one with this number, which starts at 0."""
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:number], line, *lines[number:]]))


FOREIGN = {
    "a byte that is not UTF-8": b'{"step": 2, "reward/mean": 0.\xb5}\n',
    "zeros of a crash": bytes(300) + b"\n",
    "a torn line and the next one": b'{"step": 2, "reward/me{"step": 2}\n',
    "no object": b"3\n",
    "an empty line": b"\n",
    "no step": b'{"reward/mean": 0.5}\n',
    "a step of text": b'{"step": "2"}\n',
    "a negative step": b'{"step": -2}\n',
    "an endless step": b'{"step": 1e999}\n',
    "deep nesting": b"[" * 100_000 + b"\n",
    "half a surrogate pair": b'{"step": 2, "prompt": "\\ud800"}\n',
    "a long number": b'{"step": 2, "reward/mean": ' + b"9" * 5000 + b"x}\n",
}


@pytest.mark.parametrize("line", FOREIGN.values(), ids=list(FOREIGN))
def test_a_foreign_line_stops_no_reader_and_is_named(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("run", "other"):
        record(tmp_path / name, range(1, 4))
    for file in FILES:
        insert(tmp_path / "run" / file, line, 1)
    with caplog.at_level(logging.WARNING):
        write_report(tmp_path / "run")
        assert caplog.text.count("1 line is no record and is left out: line 2 (") == 3
        write_comparison([tmp_path / "run", tmp_path / "other"], tmp_path / "comparison.html")
        assert caplog.text.count("1 line is no record and is left out: line 2 (") == 6
    screen = io.StringIO()
    watch(tmp_path / "run", Console(file=screen, width=400))
    assert screen.getvalue().count("1 line is no record and is left out: line 2 (") == 3

    caplog.clear()
    record(tmp_path / "run", range(3, 6), resumed=2)
    assert caplog.text.count("1 line is no record and is left out: line 2 (") == 3
    for file, kind in zip(FILES, (METRICS_ROWS, SAMPLE_ROWS, WAITS_ROWS), strict=True):
        notes: list[str] = []
        rows = read_records(tmp_path / "run" / file, kind, notes.append)
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
        assert len(notes) == 1  # what is no record stays: somebody may read it


def test_what_follows_the_last_kept_record_goes_with_the_later_ones(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    insert(tmp_path / "metrics.jsonl", b"torn\n", 2)
    insert(tmp_path / "metrics.jsonl", b"torn\n", 1)
    record(tmp_path, range(3, 4), resumed=2)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [line == b"torn" for line in lines] == [False, True, False, False]


def test_many_foreign_lines_are_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"x\n" * 5 + b'{"step": 1}\n')
    notes: list[str] = []
    assert read_records(tmp_path / "metrics.jsonl", METRICS_ROWS, notes.append) == [{"step": 1}]
    (note,) = notes
    assert "5 lines are no records and are left out: line 1 (" in note
    assert note.endswith("and 2 more")


def test_a_last_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    assert read_records(tmp_path / "metrics.jsonl", METRICS_ROWS, pytest.fail) == [{"step": 1}]
    assert read_records(tmp_path / "waits.jsonl", WAITS_ROWS, pytest.fail) == []


def test_a_line_without_end_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST_LINE", 100)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + b"x" * 950 + b'\n{"step": 2}\n' + b"x" * 950)
    notes: list[str] = []
    rows = read_records(tmp_path / "metrics.jsonl", METRICS_ROWS, notes.append)
    assert rows == [{"step": 1}, {"step": 2}]
    assert "line 2 (longer than 100 bytes), line 4 (longer than 100 bytes)" in notes[0]


def test_null_is_a_number_that_is_not_finite(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": null}\n')
    (row,) = read_records(tmp_path / "metrics.jsonl", METRICS_ROWS, pytest.fail)
    assert math.isnan(row["reward/mean"])


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "elsewhere"])
def test_what_is_no_file_of_the_run_is_refused_and_never_waited_for(tmp_path: Path, file: str, kind: str) -> None:
    record(tmp_path / "run", range(1, 3))
    path = tmp_path / "run" / file
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "elsewhere.jsonl")
        (tmp_path / "elsewhere.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(DataError, match=f"{file}"):
        write_report(tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"records cannot be written: .*{file} is "):
        record(tmp_path / "run", range(2, 3), resumed=1)
    assert (tmp_path / "elsewhere.jsonl").exists() is (kind != "pipe")
    if kind == "elsewhere":
        assert (tmp_path / "elsewhere.jsonl").read_text() == '{"step": 1}\n'


def test_half_a_surrogate_pair_of_the_data_costs_no_record(tmp_path: Path) -> None:
    with Tracker(tmp_path, Config()) as tracker:
        tracker.begin()
        tracker.log_samples(1, [Sample(json.loads('"a\\ud800b"'), "x", "2", 1.0)])
    (row,) = read_records(tmp_path / "samples.jsonl", SAMPLE_ROWS, pytest.fail)
    assert row["prompt"] == "a?b"


def test_median_of_an_even_number_of_values_is_between_the_middle_two() -> None:
    assert (median([4.0, 1.0, 2.0, 8.0]), median([])) == (3.0, 0.0)
