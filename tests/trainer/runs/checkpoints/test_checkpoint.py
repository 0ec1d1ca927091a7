"""Checkpoints are complete or absent, and refused with a reason."""

import hashlib
import json
import logging
import shutil
import time
from pathlib import Path

import pytest

from trainer.config.tree import Config, RunConfig
from trainer.errors import CheckpointError
from trainer.runs.checkpoints.checkpoint import (
    CheckpointWriter,
    TrainingState,
    adapter_fingerprint,
    fingerprint,
    last_checkpoint,
    read_checkpoint,
    read_resumed,
)
from trainer.runs.checkpoints.places import recorded_step, with_last_checkpoint

SUM = hashlib.sha256(b"12345678").hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def state(model: Path, step: int = 3) -> TrainingState:
    return TrainingState(step=step, seed=0, sampler={"epoch": 1}, model=fingerprint(model), config={"trainer": {}})


def write(run: Path, model: Path, step: int, keep: int | None = None, lag: int | None = None) -> Path:
    writer = CheckpointWriter(run, keep)
    writer.lag = lag
    partial = writer.begin(state(model, step))
    for role in ("actor", "critic"):
        (partial / role).mkdir()
        (partial / role / "__0_0.distcp").write_bytes(b"12345678")
    return writer.complete({f"{role}/__0_0.distcp": SUM for role in ("actor", "critic")})


@pytest.fixture
def checkpoint(tmp_path: Path, model: Path) -> Path:
    return write(tmp_path / "run", model, 3)


def names(checkpoint: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.parent.iterdir())


def test_a_checkpoint_is_read_back(checkpoint: Path, model: Path) -> None:
    assert checkpoint.name == "step_000003"
    assert read_checkpoint(checkpoint, model) == state(model)


def test_an_aborted_save_keeps_the_old_checkpoint(checkpoint: Path, model: Path) -> None:
    for step in (3, 4):
        writer = CheckpointWriter(checkpoint.parents[1])
        (writer.begin(state(model, step)) / "actor").mkdir()
        assert len(names(checkpoint)) == 2  # a hidden directory beside the checkpoint
        writer.abandon()
        assert names(checkpoint) == ["step_000003"]
    assert read_checkpoint(checkpoint, model).step == 3


def test_the_next_writer_removes_files_of_a_dead_one(checkpoint: Path, model: Path) -> None:
    (CheckpointWriter(checkpoint.parents[1]).begin(state(model, 4)) / "actor").mkdir()
    write(checkpoint.parents[1], model, 5)
    assert names(checkpoint) == ["step_000003", "step_000005"]


def test_a_checkpoint_of_the_same_step_is_replaced(checkpoint: Path, model: Path) -> None:
    (checkpoint / "actor" / "__0_0.distcp").write_bytes(b"1")
    write(checkpoint.parents[1], model, 3)
    assert read_checkpoint(checkpoint, model).step == 3
    assert names(checkpoint) == ["step_000003"]


def test_the_last_checkpoints_are_kept(checkpoint: Path, model: Path) -> None:
    run = checkpoint.parents[1]
    for step in (4, 5, 6):
        write(run, model, step, keep=2)
    assert names(checkpoint) == ["step_000005", "step_000006"]
    write(run, model, 3, keep=1)  # by a run that was continued from an earlier step: what it wrote is not the oldest
    assert names(checkpoint) == ["step_000003", "step_000005", "step_000006"]


def test_a_run_that_rolls_back_keeps_whole_checkpoints_from_before_the_fault(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run"
    for step in range(1, 8):
        write(run, model, step, keep=1, lag=2)
    checkpoints = run / "checkpoints"
    assert names(checkpoints / "any") == ["step_000001", "step_000003", "step_000005", "step_000007"]
    # Step 8 finds that the weights of step 5 may be at fault.
    assert last_checkpoint(run, below=5) == checkpoints / "step_000003"
    (checkpoints / "step_000003" / "actor" / "__0_0.distcp").write_bytes(b"damaged!")
    assert last_checkpoint(run, below=5) == checkpoints / "step_000001"


def test_auto_resume_takes_the_last_complete_checkpoint(checkpoint: Path, model: Path) -> None:
    run = checkpoint.parents[1]
    trainer = {"resume": "auto", "run_id": run.name, "output_dir": run.parent}
    config = RunConfig.model_validate({"trainer": trainer})
    write(run, model, 12)
    CheckpointWriter(run).begin(state(model, 13))
    found = with_last_checkpoint(config)
    assert found.trainer.resume == checkpoint.with_name("step_000012")
    assert recorded_step(config.trainer, run, read_checkpoint(found.trainer.resume, model)) == 12
    shutil.rmtree(run)
    assert with_last_checkpoint(config).trainer.resume is None
    assert recorded_step(config.trainer, run, None) == -1  # what it recorded before it died goes
    with pytest.raises(ValueError, match=r"trainer\.resume=auto needs trainer\.run_id"):
        RunConfig.model_validate({"trainer": {"resume": "auto"}})


def test_the_newest_checkpoint_that_is_whole_counts(
    checkpoint: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = checkpoint.parents[1]
    write(run, model, 20)
    newest = write(run, model, 12)  # by a run that was resumed before step 20
    assert last_checkpoint(run) == newest
    damage_shard_zeroed(newest, model)
    damage_state_cut(checkpoint.with_name("step_000020"), model)
    with caplog.at_level(logging.WARNING):
        assert last_checkpoint(run) == checkpoint
    assert "skipped a checkpoint: " in caplog.text
    assert f"{newest}: damaged: critic/__0_0.distcp changed" in caplog.text
    assert "step_000020/state.json: damaged" in caplog.text
    damage_shard_cut(checkpoint, model)
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints is whole"):  # a new run would end this one
        last_checkpoint(run)


def test_a_clock_that_was_set_back_does_not_hide_the_newest_checkpoint(
    checkpoint: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    write(checkpoint.parents[1], model, 9)
    newest = write(checkpoint.parents[1], model, 4)
    assert last_checkpoint(checkpoint.parents[1]) == newest


def test_a_checkpoint_without_checksums_is_read(checkpoint: Path, model: Path) -> None:
    """Format 1 has none."""
    manifest = json.loads((checkpoint / "state.json").read_text())
    manifest["state"]["format"] = 1
    del manifest["checksums"], manifest["written"]
    (checkpoint / "state.json").write_text(json.dumps(manifest))
    assert read_checkpoint(checkpoint, model).step == 3
    assert last_checkpoint(checkpoint.parents[1]) == checkpoint


def test_only_the_files_of_the_named_roles_are_read(checkpoint: Path, model: Path) -> None:
    damage_shard_zeroed(checkpoint, model)
    assert read_checkpoint(checkpoint, model, ["actor"]).step == 3


def test_an_unwritable_directory_is_named(tmp_path: Path, model: Path) -> None:
    (tmp_path / "run").write_text("a file where a directory should be")
    with pytest.raises(CheckpointError, match=r"step_000003\S* cannot be written"):
        CheckpointWriter(tmp_path / "run").begin(state(model))


def damage_missing(checkpoint: Path, model: Path) -> None:
    shutil.rmtree(checkpoint)


def damage_state_absent(checkpoint: Path, model: Path) -> None:
    (checkpoint / "state.json").unlink()


def damage_state_cut(checkpoint: Path, model: Path) -> None:
    text = (checkpoint / "state.json").read_text()
    (checkpoint / "state.json").write_text(text[: len(text) // 2])


def damage_shard_absent(checkpoint: Path, model: Path) -> None:
    (checkpoint / "critic" / "__0_0.distcp").unlink()


def damage_shard_cut(checkpoint: Path, model: Path) -> None:
    (checkpoint / "actor" / "__0_0.distcp").write_bytes(b"1234")


def damage_shard_zeroed(checkpoint: Path, model: Path) -> None:
    (checkpoint / "critic" / "__0_0.distcp").write_bytes(bytes(8))


def damage_other_format(checkpoint: Path, model: Path) -> None:
    manifest = json.loads((checkpoint / "state.json").read_text())
    manifest["state"]["format"] = 99
    (checkpoint / "state.json").write_text(json.dumps(manifest))


def damage_other_model(checkpoint: Path, model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"WEIGHTS")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "no such checkpoint"),
        (damage_state_absent, "it has no state.json"),
        (damage_state_cut, "state.json: damaged"),
        (damage_shard_absent, "critic/__0_0.distcp is missing"),
        (damage_shard_cut, "actor/__0_0.distcp has 4 bytes instead of 8"),
        (damage_shard_zeroed, r"critic/__0_0.distcp changed since it was written \(SHA-256\)"),
        (damage_other_format, "written in format 99"),
        (damage_other_model, "belongs to another model"),
    ],
)
def test_a_damaged_file_is_named(checkpoint: Path, model: Path, damage: object, message: str) -> None:
    damage(checkpoint, model)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(checkpoint, model)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_a_role_that_the_run_trains_is_refused(tmp_path: Path, model: Path) -> None:
    writer = CheckpointWriter(tmp_path / "run")
    partial = writer.begin(state(model))
    (partial / "actor").mkdir()
    (partial / "actor" / "__0_0.distcp").write_bytes(b"1")
    checkpoint = writer.complete({})
    assert read_checkpoint(checkpoint, model, ["actor"]).step == 3
    with pytest.raises(CheckpointError, match="holds no critic, which this run trains") as caught:
        read_checkpoint(checkpoint, model, ["actor", "critic"])
    assert "algorithm.advantage" in caught.value.hint


def test_a_run_that_continues_with_another_adapter_is_refused(tmp_path: Path, model: Path) -> None:
    def config(adapter: str | None) -> Config:
        lora = {} if adapter is None else {"path": tmp_path / adapter}
        trainer = {"resume": tmp_path / "run" / "checkpoints" / "step_000003"}
        return Config.model_validate({"model": {"path": model}, "actor": {"lora": lora}, "trainer": trainer})

    for name, weights in (("started", b"1"), ("copied", b"1"), ("another", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(weights)
    writer = CheckpointWriter(tmp_path / "run")
    adapter = adapter_fingerprint(config("started"))
    writer.begin(state(model).model_copy(update={"adapter": adapter}))
    writer.complete({})
    for same in ("started", "copied"):
        resumed = read_resumed(config(same), [])
        assert resumed is not None
        assert resumed.step == 3
    for other in ("another", None):
        with pytest.raises(CheckpointError, match=r"started from another adapter than actor\.lora\.path="):
            read_resumed(config(other), [])


def test_a_checkpoint_of_an_earlier_version_names_no_adapter(checkpoint: Path, model: Path) -> None:
    config = Config.model_validate({"model": {"path": model}, "trainer": {"resume": checkpoint}})
    assert read_resumed(config, []) == state(model)
    assert read_resumed(Config(), []) is None


def test_the_hint_names_a_checkpoint_that_can_be_used_instead(checkpoint: Path, model: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(checkpoint.with_name("step_000004"), model)
    assert str(checkpoint) in caught.value.hint
