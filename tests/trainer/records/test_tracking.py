import json
import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from trainer.config.tree import Config
from trainer.errors import CheckpointError, ConfigError, DataError
from trainer.records.files.records import SAMPLE_ROWS, read_records
from trainer.records.files.run_files import RecordedRun
from trainer.records.pages.model_card import CARD, write_model_card
from trainer.records.pages.plots import draw_learning
from trainer.records.pages.report import save_learning_curve, write_report
from trainer.records.tracking import Sample, Tracker


def record(run_dir: Path, steps: range, resumed: int | None = None, response: str = "") -> None:
    with Tracker(run_dir, Config(), resumed) as tracker:
        tracker.begin()
        for step in steps:
            with tracker.phase("generate"):
                pass
            tracker.log_samples(step, [Sample("<b>1+1</b>", response or f"step {step}", "2", 1.0)])
            tracker.log(step, {"reward/mean": step / 10, "validation/exact_match": step / 10, "time/step": 1.0})


def read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_metrics_samples_settings_and_tensorboard(tmp_path: Path) -> None:
    record(tmp_path / "run", range(1, 4))
    metrics = read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(row["time/generate"] >= 0 for row in metrics)
    assert len(read(tmp_path / "run" / "samples.jsonl")) == 3
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == Config().model_dump(mode="json")
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_a_resumed_run_records_each_step_once(tmp_path: Path) -> None:
    record(tmp_path, range(1, 6))
    record(tmp_path, range(4, 8), resumed=3)
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == list(range(1, 8))
    assert [row["step"] for row in read(tmp_path / "samples.jsonl")] == list(range(1, 8))
    record(tmp_path, range(0, 2), resumed=-1)
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    record(tmp_path, range(1, 3))
    with pytest.raises(ConfigError) as caught, Tracker(tmp_path, Config()):
        pass
    assert "trainer.resume" in caught.value.hint


def test_a_run_that_is_refused_at_its_start_changes_no_record(tmp_path: Path) -> None:
    record(tmp_path, range(1, 6))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*") if path.name != "phase.json"}
    with pytest.raises(DataError), Tracker(tmp_path, Config(), resumed_step=2):
        raise DataError("other data")
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_a_disk_without_room_for_the_records_is_explained(tmp_path: Path) -> None:
    with Tracker(tmp_path, Config()) as tracker:
        (tmp_path / "samples.jsonl").mkdir()  # opening it fails as on a full disk
        with pytest.raises(CheckpointError, match="records cannot be written"):
            tracker.begin()


def test_a_number_that_is_not_finite_is_named_in_the_model_card(tmp_path: Path) -> None:
    with Tracker(tmp_path, Config()) as tracker:
        tracker.begin()
        tracker.log(1, {"validation/sft_loss": math.nan, "reward/mean": 0.25})
    write_model_card(tmp_path, tmp_path, 1, tmp_path, {})
    card = (tmp_path / CARD).read_text()
    assert "| validation/sft_loss | not finite | 1 |" in card
    assert "| reward/mean | 0.25 | 1 |" in card


def test_a_run_that_failed_to_start_can_be_tried_again(tmp_path: Path) -> None:
    record(tmp_path, range(0))
    record(tmp_path, range(1, 3))
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_the_report_is_one_page_without_addresses_or_markup_of_the_model(tmp_path: Path) -> None:
    record(tmp_path, range(1, 5))
    text = write_report(tmp_path).read_text()
    assert "10.0% → 40.0%" in text
    assert "&lt;b&gt;1+1&lt;/b&gt;" in text
    assert "<b>1+1</b>" not in text
    assert text.count("<svg") == 3  # learning and time: what was not recorded has no empty plot
    for sign in ("<script", "<link", 'src="http', "url(http", "@import"):
        assert sign not in text
    assert "actor.learning_rate" in text


def test_the_report_shows_the_use_of_the_hardware_if_it_was_measured(tmp_path: Path) -> None:
    record(tmp_path, range(1, 2))
    assert "Use of the hardware" not in write_report(tmp_path).read_text()
    with Tracker(tmp_path, Config(), resumed_step=1) as tracker:
        tracker.begin()
        tracker.log_waits(2, {"rollout": (1.0, "rollout rank 3 on n4"), "reward": (0.001, "reward rank 1 on n4")})
        use = {"gpu/utilization": 0.5, "mfu/update_actor": 0.4, "tflops/update_actor": 400.0, "time/step": 5.0}
        tracker.log(2, use | {"rollout/staleness/0": 0.25, "rollout/staleness/1": 0.75, "idle/actor": 1.0})
    text = write_report(tmp_path).read_text()
    for shown in ("Use of the hardware", "GPU utilisation", "(MFU)", "Age of the tokens", "rollout rank 3 on n4"):
        assert shown in text
    for absent in ("TFLOP/s", "Engines, shares", "reward rank 1"):  # MFU says more; not measured; not noticeable
        assert absent not in text


def test_a_resumed_run_keeps_the_waits_of_its_steps(tmp_path: Path) -> None:
    for resumed, steps in ((None, range(1, 4)), (2, range(3, 5))):
        with Tracker(tmp_path, Config(), resumed) as tracker:
            tracker.begin()
            for step in steps:
                tracker.log_waits(step, {"rollout": (1.0, "rollout rank 3 on n4")})
    assert [row["step"] for row in read(tmp_path / "waits.jsonl")] == [1, 2, 3, 4]


def test_a_run_with_a_truncated_last_line_has_a_report(tmp_path: Path) -> None:
    record(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rewa')
    assert "10.0% → 20.0%" in write_report(tmp_path).read_text()


def test_rewards_outside_0_to_1_are_plotted() -> None:
    rows = [{"step": 1.0, "reward/mean": -3.0}, {"step": 2.0, "reward/mean": float("nan")}]
    axes = Figure().subplots()
    draw_learning(axes, RecordedRun("run", rows, [], {}))
    low, high = axes.get_ylim()
    assert low < -3
    assert high > 1


def test_a_sample_stays_on_one_line_with_any_text(tmp_path: Path) -> None:
    """Unicode has line ends that JSON does not have."""
    record(tmp_path, range(1, 3), response="a\u2028b\x85c\x0cd\r\ne")
    assert "a\u2028b\x85c" in write_report(tmp_path).read_text()
    record(tmp_path, range(2, 3), resumed=1)
    assert len(read_records(tmp_path / "samples.jsonl", SAMPLE_ROWS, pytest.fail)) == 2


@pytest.mark.parametrize(
    ("name", "start"), [("curve.png", b"\x89PNG"), ("curve.svg", b"<?xml"), ("curve.pdf", b"%PDF")]
)
def test_the_learning_curve_is_a_picture(tmp_path: Path, name: str, start: bytes) -> None:
    record(tmp_path, range(1, 5))
    save_learning_curve(tmp_path, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"curve.txt: not a kind of picture"):
        save_learning_curve(tmp_path, tmp_path / "curve.txt")


def test_a_picture_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    record(tmp_path, range(1, 5))
    with pytest.raises(DataError, match=r"nowhere/curve.png: cannot be written"):
        save_learning_curve(tmp_path, tmp_path / "nowhere" / "curve.png")


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no metrics.jsonl there"), ("", "no step"), ('{"st\n', r"no step was finished: .*left out: line 1 \(")],
)
def test_a_run_without_usable_metrics_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=words):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
