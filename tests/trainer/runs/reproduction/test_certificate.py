"""What the certificate of a resumed run holds."""

import shutil
from pathlib import Path

import pytest

from tests.trainer.runs.reproduction.conftest import certify, edited, flip_last_byte, settings
from trainer.errors import ConfigError
from trainer.runs.reproduction.certificate import Weights, read_certificate
from trainer.runs.reproduction.replay import replay

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_resumed_run_continues_its_certificate(run: Path, tmp_path: Path) -> None:
    first = read_certificate(run)
    resumed = certify(run, settings(tmp_path), steps=(3,), checkpoint=run / "checkpoints" / "step_000001")
    assert resumed.steps == [1, 3]
    assert resumed.weights(1) == first.weights(1)
    assert resumed.changes == []
    assert resumed.origin is None


def test_what_changed_when_a_run_was_resumed_is_said_and_recorded_and_no_longer_repeatable(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip_last_byte(tmp_path / "data.jsonl")
    config = settings(tmp_path, seed=3)
    certificate = certify(run, config, steps=(3,), checkpoint=run / "checkpoints" / "step_000001")
    assert certificate.changes == [
        f"from step 2 on: data.train_files.0: {tmp_path}/data.jsonl changed (SHA-256)",
        "from step 2 on: trainer.seed: 0 / 3",
    ]
    assert "the run continues with a change, from step 2 on: trainer.seed: 0 / 3" in caplog.text
    with pytest.raises(ConfigError, match=r"from step 2 on: trainer\.seed: 0 / 3"):
        replay(run)


def test_a_run_from_another_runs_checkpoint_names_it(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    start = run / "checkpoints" / "step_000002"
    certificate = certify(other, settings(tmp_path), steps=(3,), checkpoint=start)
    assert certificate.origin is not None
    assert certificate.origin.path == str(start)
    assert certificate.origin == read_certificate(run).checkpoints[2].model_copy(update={"path": str(start)})


def test_an_input_that_cannot_be_read_costs_a_resumed_run_no_other_entry(
    run: Path, tmp_path: Path, unreadable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = read_certificate(run)
    resumed = certify(run, settings(tmp_path), steps=(3,), checkpoint=run / "checkpoints" / "step_000001")
    assert f"{unreadable} cannot be hashed: [Errno 5] Input/output error" in caplog.text
    assert resumed.inputs["model.path"] == first.inputs["model.path"]
    assert resumed.steps == [1, 3]
    assert resumed.weights(1) == first.weights(1)
    (change,) = resumed.changes
    assert change.startswith(f"from step 2 on: data.train_files.0: {unreadable} could not be hashed")
    with pytest.raises(ConfigError, match=r"\n  data\.train_files\.0: .*data\.jsonl could not be hashed"):
        replay(run)


def test_a_resumed_checkpoint_that_was_removed_costs_no_other_entry(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, removed = read_certificate(run), run / "checkpoints" / "step_000002"
    edited(run, checkpoints={"1": first.checkpoints[1].model_dump()}, changes=["from step 1 on: another image"])
    shutil.rmtree(removed)
    resumed = certify(run, settings(tmp_path), steps=(3,), checkpoint=removed)
    assert f"{removed} cannot be hashed" in caplog.text
    assert [*resumed.checkpoints] == [1, 3]
    assert (resumed.inputs, resumed.changes) == (first.inputs, ["from step 1 on: another image"])


def test_a_run_whose_origin_was_removed_before_it_was_certified_is_not_replayed(run: Path, tmp_path: Path) -> None:
    start, other = run / "checkpoints" / "step_000002", tmp_path / "other"
    kept = start.rename(tmp_path / "kept")
    other.mkdir()
    certificate = certify(other, settings(tmp_path), steps=(3,), checkpoint=start)
    assert certificate.origin == Weights(path=str(start), content={})
    assert certificate.inputs == read_certificate(run).inputs
    with pytest.raises(ConfigError, match="step_000002 is missing"):
        replay(other)
    kept.rename(start)
    with pytest.raises(ConfigError, match="its weights could not be read when they were to be certified"):
        replay(other)
