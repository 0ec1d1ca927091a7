"""One page about several runs."""

from pathlib import Path

import pytest

from trainer.config.tree import Config
from trainer.errors import DataError
from trainer.records.pages.comparison import write_comparison
from trainer.records.tracking import Sample, Tracker


def record(directory: Path, reward: float, **algorithm: object) -> Path:
    with Tracker(directory, Config.model_validate({"algorithm": algorithm})) as tracker:
        tracker.begin()
        for step in range(3):
            tracker.log_samples(step, [Sample("1+1?", f"<b>{directory.name}</b>", "2", reward)])
            tracker.log(step, {"reward/mean": reward * step, "time/step": 1.0, "time/generate": 0.6})
    return directory


def test_runs_are_shown_side_by_side_with_their_differences(tmp_path: Path) -> None:
    first = record(tmp_path / "plain", 0.1)
    two = record(tmp_path / "other", 0.3, advantage="grpo", gamma=0.9)
    text = write_comparison([first, two], tmp_path / "both.html").read_text()
    assert "0.000 → 0.600" in text
    assert "algorithm.gamma" in text
    assert "algorithm.lam" not in text  # the same in both
    assert "&lt;b&gt;other&lt;/b&gt;" in text
    assert "Exact match" not in text.partition("<h2>")[0].partition("plots")[2]  # no run measured it
    for sign in ("<script", "<link", 'src="http', "url(http", "@import"):
        assert sign not in text


def test_equal_settings_are_reported_as_equal(tmp_path: Path) -> None:
    text = write_comparison([record(tmp_path / "a", 0.1), record(tmp_path / "b", 0.2)], tmp_path / "c.html").read_text()
    assert "All settings are equal." in text


def test_a_run_without_metrics_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no metrics\.jsonl there"):
        write_comparison([record(tmp_path / "a", 0.1), tmp_path / "empty"], tmp_path / "c.html")
    assert not (tmp_path / "c.html").exists()
