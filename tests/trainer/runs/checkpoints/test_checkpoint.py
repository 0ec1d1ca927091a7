"""Checkpoints are complete or absent, and refused with a reason."""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sealing import reseal
from tests.training_state import training_state
from trainer.config.tree import Config, RunConfig
from trainer.errors import CheckpointError
from trainer.runs.checkpoints.checkpoint import (
    CheckpointWriter,
    hashed_inputs,
    last_checkpoint,
    read_checkpoint,
    read_resumed,
    starting_files,
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


def write(run: Path, step: int, keep: int | None = None, lag: int | None = None) -> Path:
    writer = CheckpointWriter(run, keep)
    writer.lag = lag
    partial = writer.begin(training_state(step))
    for role in ("actor", "critic"):
        (partial / role).mkdir()
        (partial / role / "__0_0.distcp").write_bytes(b"12345678")
    return writer.complete({f"{role}/__0_0.distcp": SUM for role in ("actor", "critic")})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "run", 3)


def names(checkpoint: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.parent.iterdir())


def test_a_checkpoint_is_read_back(checkpoint: Path) -> None:
    assert checkpoint.name == "step_000003"
    assert read_checkpoint(checkpoint) == training_state(3)


def test_an_aborted_save_keeps_the_old_checkpoint(checkpoint: Path) -> None:
    for step in (3, 4):
        writer = CheckpointWriter(checkpoint.parents[1])
        (writer.begin(training_state(step)) / "actor").mkdir()
        assert len(names(checkpoint)) == 2  # a hidden directory beside the checkpoint
        writer.abandon()
        assert names(checkpoint) == ["step_000003"]
    assert read_checkpoint(checkpoint).step == 3


def test_the_next_writer_removes_files_of_a_dead_one(checkpoint: Path) -> None:
    (CheckpointWriter(checkpoint.parents[1]).begin(training_state(4)) / "actor").mkdir()
    write(checkpoint.parents[1], 5)
    assert names(checkpoint) == ["step_000003", "step_000005"]


def test_a_checkpoint_of_the_same_step_is_replaced(checkpoint: Path) -> None:
    (checkpoint / "actor" / "__0_0.distcp").write_bytes(b"1")
    write(checkpoint.parents[1], 3)
    assert read_checkpoint(checkpoint).step == 3
    assert names(checkpoint) == ["step_000003"]


def test_the_last_checkpoints_are_kept(checkpoint: Path) -> None:
    run = checkpoint.parents[1]
    for step in (4, 5, 6):
        write(run, step, keep=2)
    assert names(checkpoint) == ["step_000005", "step_000006"]
    write(run, 3, keep=1)  # by a run that was continued from an earlier step: what it wrote is not the oldest
    assert names(checkpoint) == ["step_000003", "step_000005", "step_000006"]


def test_a_run_that_rolls_back_keeps_whole_checkpoints_from_before_the_fault(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in range(1, 8):
        write(run, step, keep=1, lag=2)
    checkpoints = run / "checkpoints"
    assert names(checkpoints / "any") == ["step_000001", "step_000003", "step_000005", "step_000007"]
    # Step 8 finds that the weights of step 5 may be at fault.
    assert last_checkpoint(run, below=5) == checkpoints / "step_000003"
    (checkpoints / "step_000003" / "actor" / "__0_0.distcp").write_bytes(b"damaged!")
    assert last_checkpoint(run, below=5) == checkpoints / "step_000001"


def test_auto_resume_takes_the_last_complete_checkpoint(checkpoint: Path) -> None:
    run = checkpoint.parents[1]
    trainer = {"resume": "auto", "run_id": run.name, "output_dir": run.parent}
    config = RunConfig.model_validate({"trainer": trainer})
    write(run, 12)
    CheckpointWriter(run).begin(training_state(13))
    resumed = with_last_checkpoint(config)
    assert resumed.trainer.resume == checkpoint.with_name("step_000012")
    assert recorded_step(config.trainer, run, read_checkpoint(resumed.trainer.resume)) == 12
    shutil.rmtree(run)
    assert with_last_checkpoint(config).trainer.resume is None
    assert recorded_step(config.trainer, run, None) == -1  # what it recorded before it died goes
    with pytest.raises(ValueError, match=r"trainer\.resume=auto needs trainer\.run_id"):
        RunConfig.model_validate({"trainer": {"resume": "auto"}})


def test_the_newest_checkpoint_that_is_whole_counts(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = checkpoint.parents[1]
    write(run, 20)
    newest = write(run, 12)  # by a run that was resumed before step 20
    assert last_checkpoint(run) == newest
    damage_shard_zeroed(newest)
    damage_state_cut(checkpoint.with_name("step_000020"))
    with caplog.at_level(logging.WARNING):
        assert last_checkpoint(run) == checkpoint
    assert "skipped a checkpoint: " in caplog.text
    assert f"{newest}: damaged: critic/__0_0.distcp changed" in caplog.text
    assert "step_000020/state.json: damaged" in caplog.text
    damage_shard_cut(checkpoint)
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints is whole"):  # a new run would end this one
        last_checkpoint(run)


def test_a_clock_that_was_set_back_does_not_hide_the_newest_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    write(checkpoint.parents[1], 9)
    newest = write(checkpoint.parents[1], 4)
    assert last_checkpoint(checkpoint.parents[1]) == newest


def test_only_the_files_of_the_named_roles_are_read(checkpoint: Path) -> None:
    damage_shard_zeroed(checkpoint)
    assert read_checkpoint(checkpoint, ["actor"]).step == 3


def test_an_unwritable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a directory should be")
    with pytest.raises(CheckpointError, match=r"step_000003\S* cannot be written"):
        CheckpointWriter(tmp_path / "run").begin(training_state(3))


def damage_missing(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)


def damage_state_absent(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def damage_state_cut(checkpoint: Path) -> None:
    text = (checkpoint / "state.json").read_text()
    (checkpoint / "state.json").write_text(text[: len(text) // 2])


def damage_state_nested(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text("[" * 100_000)


def damage_state_edited(checkpoint: Path) -> None:
    text = (checkpoint / "state.json").read_text()
    (checkpoint / "state.json").write_text(text.replace('"position": 0', '"position": 1'))


def damage_state_without_seal(checkpoint: Path) -> None:
    tree = json.loads((checkpoint / "state.json").read_text())
    del tree["sha256"]
    (checkpoint / "state.json").write_text(json.dumps(tree))


def damage_state_device(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()
    (checkpoint / "state.json").symlink_to("/dev/zero")


def damage_state_pipe(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()
    os.mkfifo(checkpoint / "state.json")


def damage_shard_absent(checkpoint: Path) -> None:
    (checkpoint / "critic" / "__0_0.distcp").unlink()


def damage_shard_cut(checkpoint: Path) -> None:
    (checkpoint / "actor" / "__0_0.distcp").write_bytes(b"1234")


def damage_shard_zeroed(checkpoint: Path) -> None:
    (checkpoint / "critic" / "__0_0.distcp").write_bytes(bytes(8))


def damage_shard_device(checkpoint: Path) -> None:
    (checkpoint / "actor" / "__0_0.distcp").unlink()
    (checkpoint / "actor" / "__0_0.distcp").symlink_to("/dev/zero")


def damage_shard_pipe(checkpoint: Path) -> None:
    (checkpoint / "actor" / "__0_0.distcp").unlink()
    os.mkfifo(checkpoint / "actor" / "__0_0.distcp")


def damage_more_pipe(checkpoint: Path) -> None:
    """The metadata of a role could name it."""
    os.mkfifo(checkpoint / "actor" / "__9_0.distcp")


def damage_role_elsewhere(checkpoint: Path) -> None:
    (checkpoint / "actor").rename(checkpoint.parent / "elsewhere")
    (checkpoint / "actor").symlink_to(checkpoint.parent / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "no such checkpoint"),
        (damage_state_absent, "it has no state.json"),
        (damage_state_cut, "state.json: damaged"),
        (damage_state_nested, "state.json: damaged: it is nested too deeply"),
        (damage_state_edited, r"state.json: damaged: it changed since it was written \(SHA-256\)"),
        (damage_state_without_seal, "state.json: damaged: it lacks its own SHA-256"),
        (damage_state_device, "state.json: damaged: .* is not a regular file"),
        (damage_state_pipe, "state.json: damaged: .* is not a regular file"),
        (damage_shard_absent, "critic/__0_0.distcp is missing"),
        (damage_shard_cut, "actor/__0_0.distcp has 4 bytes instead of 8"),
        (damage_shard_zeroed, r"critic/__0_0.distcp changed since it was written \(SHA-256\)"),
        (damage_shard_device, "cannot be read: .*actor/__0_0.distcp is a link, a pipe or a device"),
        (damage_shard_pipe, "cannot be read: .*actor/__0_0.distcp is a link, a pipe or a device"),
        (damage_role_elsewhere, "cannot be read: .*actor is a link, a pipe or a device"),
        (damage_more_pipe, "cannot be read: .*actor/__9_0.distcp is a link, a pipe or a device"),
    ],
)
def test_a_damaged_file_is_named(checkpoint: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(checkpoint)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("format", 99, "format: Input should be 3"),
        ("files", {"/dev/zero": {"size": 0, "sha256": SUM}}, "/dev/zero is missing"),
        ("files", {"../../../../../dev/zero": {"size": 0, "sha256": SUM}}, "dev/zero is missing"),
        ("files", {"actor/__0_0.distcp": {"size": -8, "sha256": SUM}}, "files.actor/__0_0.distcp.size: "),
        ("files", {"actor/__0_0.distcp": {"size": 8, "sha256": "00"}}, "files.actor/__0_0.distcp.sha256: "),
        ("inputs", {"model.path": {"config.json": "../.."}}, "inputs.model.path.config.json: "),
        ("written", 1e999, "written: "),
        ("state.step", -1, "state.step: "),
        ("state.step", "3", "state.step: "),
        ("state.step", 4, "of step 4, in a directory of another step"),
        ("state.seed", None, "state.seed: "),
        ("state.sampler", {}, "state.sampler.epoch: "),
        ("state.sampler", {"epoch": 0, "position": -1, "size": 8, "seed": 0}, "state.sampler.position: "),
        ("state.lowered", [{"setting": "actor", "before": 2, "after": 1}], "state.lowered.0: .* no limit of micro-b"),
        ("state.lowered", [{"setting": "trainer.seed", "before": 2, "after": 1}], "state.lowered.0: "),
        ("state.lowered", [{"setting": "actor.micro_batch_size", "before": 2, "after": 0}], "state.lowered.0: "),
        ("state.lowered", [3], "state.lowered.0: "),
        ("state.kl_coefficient", 1e999, "state.kl_coefficient: "),
        ("state.exact_match", "nan", "state.exact_match: "),
        ("state.watched", {"reference/kl": [[]]}, "state.watched.reference/kl.0: "),
        ("state.more", 1, "state.more: "),
    ],
)
def test_a_manifest_of_other_types_or_places_is_refused(
    checkpoint: Path, entry: str, value: object, message: str
) -> None:
    section, _, name = entry.rpartition(".")
    reseal(checkpoint / "state.json", lambda tree: (tree[section] if section else tree).update({name: value}))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(checkpoint)
    assert "\n" not in str(caught.value)


def test_a_damaged_time_does_not_hide_the_newest_checkpoint(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = write(checkpoint.parents[1], 4)
    text = (newest / "state.json").read_text()
    (newest / "state.json").write_text(re.sub(r'"written": \d', '"written": 0', text))
    assert last_checkpoint(checkpoint.parents[1]) == checkpoint
    assert f"skipped a checkpoint: {newest}/state.json: damaged" in caplog.text


def test_a_checkpoint_without_a_role_that_the_run_trains_is_refused(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "run")
    partial = writer.begin(training_state(3))
    (partial / "actor").mkdir()
    (partial / "actor" / "__0_0.distcp").write_bytes(b"1")
    checkpoint = writer.complete({})
    assert read_checkpoint(checkpoint, ["actor"]).step == 3
    with pytest.raises(CheckpointError, match="holds no critic, which this run trains") as caught:
        read_checkpoint(checkpoint, ["actor", "critic"])
    assert "algorithm.advantage" in caught.value.hint


def started_from(tmp_path: Path, **changes: Path | None) -> Config:
    """The settings of a run on one adapter, one critic and two files, some of them in another place or absent."""
    paths = {name: changes.get(name, tmp_path / name) for name in ("model", "adapter", "critic", "first", "second")}
    return Config.model_validate(
        {
            "model": {"path": paths["model"]},
            "actor": {"lora": {"path": paths["adapter"]}},
            "critic": {"path": paths["critic"]},
            "algorithm": {"advantage": "gae"},
            "data": {"train_files": [path for name in ("first", "second") if (path := paths[name])]},
            "trainer": {"resume": tmp_path / "run" / "checkpoints" / "step_000003"},
        }
    )


@pytest.fixture
def begun(tmp_path: Path, model: Path) -> Config:
    """A run that has written a checkpoint."""
    for name in ("adapter", "critic"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"1")
    for name in ("first", "second"):
        (tmp_path / name).write_text(f'{{"prompt": "{name}"}}')
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(2**21))
    config = started_from(tmp_path)
    writer = CheckpointWriter(tmp_path / "run", inputs=lambda: hashed_inputs(starting_files(config)))
    writer.begin(training_state(3))
    writer.complete({})
    assert read_resumed(config, []) == training_state(3)
    return config


def test_a_run_goes_on_with_the_same_files_in_another_place(begun: Config, tmp_path: Path) -> None:
    copies = {}
    for name in ("model", "adapter", "critic"):
        copies[name] = Path(shutil.copytree(tmp_path / name, tmp_path / "copies" / name))
    copies["first"] = Path(shutil.copy(tmp_path / "first", tmp_path / "copies" / "renamed"))
    assert read_resumed(started_from(tmp_path, **copies), []) == training_state(3)


def flip_last_byte(file: Path) -> None:
    """The size and the time of its last change stay."""
    content, times = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    ("changed", "setting"),
    [
        ("model/config.json", "model.path"),
        ("model/generation_config.json", "model.path"),
        ("model/tokenizer.json", "model.path"),
        ("model/tokenizer_config.json", "model.path"),
        ("model/chat_template.jinja", "model.path"),
        ("model/model.safetensors", "model.path"),  # behind its first MiB
        ("adapter/adapter_model.safetensors", "actor.lora.path"),
        ("critic/adapter_model.safetensors", "critic.path"),
        ("second", "data.train_files.1"),
    ],
)
def test_a_run_does_not_go_on_with_another_content_of_the_same_size(
    begun: Config, tmp_path: Path, changed: str, setting: str
) -> None:
    flip_last_byte(tmp_path / changed)
    with pytest.raises(CheckpointError, match=rf"{setting}: {tmp_path / changed} changed \(SHA-256\)$") as caught:
        read_resumed(begun, [])
    assert "belongs to another model or other data" in str(caught.value)


def test_a_file_that_came_to_the_model_or_is_gone_is_named(begun: Config, tmp_path: Path, model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    (model / "added_tokens.json").write_text("{}")
    (tmp_path / "second").unlink()
    with pytest.raises(CheckpointError) as caught:
        read_resumed(begun, [])
    for line in (
        f"data.train_files.1: {tmp_path}/second is missing",
        f"model.path: {model}/added_tokens.json is new",
        f"model.path: {model}/chat_template.jinja is missing",
    ):
        assert line in str(caught.value)


def test_a_setting_that_came_or_went_is_named(begun: Config, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"data: actor\.lora\.path is not set; data\.train_files\.1 is not set$"):
        read_resumed(started_from(tmp_path, adapter=None, second=None), [])
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "run" / "old")
    config = started_from(tmp_path, adapter=None)
    writer = CheckpointWriter(tmp_path / "run", inputs=lambda: hashed_inputs(starting_files(config)))
    writer.begin(training_state(3))
    writer.complete({})
    with pytest.raises(CheckpointError, match=r"data: actor\.lora\.path is set$"):
        read_resumed(begun, [])


def test_a_run_that_starts_anew_reads_no_checkpoint() -> None:
    assert read_resumed(Config(), []) is None


def test_the_hint_names_a_checkpoint_that_can_be_used_instead(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(checkpoint.with_name("step_000004"))
    assert str(checkpoint) in caught.value.hint
