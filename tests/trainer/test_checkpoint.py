"""Checkpoints are complete or absent, and refused with a reason."""

import json
import shutil
from pathlib import Path

import pytest

from trainer.checkpoint import TrainingState, checkpoint_directory, fingerprint, new_checkpoint, read_checkpoint
from trainer.errors import CheckpointError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def state(model: Path, step: int = 3) -> TrainingState:
    return TrainingState(step=step, seed=0, sampler={"epoch": 1}, model=fingerprint(model), config={"trainer": {}})


@pytest.fixture
def checkpoint(tmp_path: Path, model: Path) -> Path:
    directory = checkpoint_directory(tmp_path / "run", 3)
    with new_checkpoint(directory, state(model)) as partial:
        for role in ("actor", "critic"):
            (partial / role).mkdir()
            (partial / role / "__0_0.distcp").write_bytes(b"12345678")
    return directory


def test_what_was_saved_is_read(checkpoint: Path, model: Path) -> None:
    assert checkpoint.name == "step_000003"
    assert read_checkpoint(checkpoint, model) == state(model)


def test_a_save_that_fails_leaves_the_old_checkpoint_or_none(checkpoint: Path, model: Path) -> None:
    for directory, survivors in ((checkpoint, 1), (checkpoint.with_name("step_000004"), 1)):
        with pytest.raises(RuntimeError), new_checkpoint(directory, state(model)) as partial:  # noqa: PT012
            (partial / "actor").mkdir()
            raise RuntimeError("a worker died")
        assert len(list(checkpoint.parent.iterdir())) == survivors
    assert read_checkpoint(checkpoint, model).step == 3


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, model: Path) -> None:
    (tmp_path / "run").write_text("a file where a directory should be")
    with (
        pytest.raises(CheckpointError, match="step_000003: cannot be written"),
        new_checkpoint(checkpoint_directory(tmp_path / "run", 3), state(model)),
    ):
        pass


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
        (damage_other_format, "written in format 99"),
        (damage_other_model, "belongs to another model"),
    ],
)
def test_damage_is_named(checkpoint: Path, model: Path, damage: object, message: str) -> None:
    damage(checkpoint, model)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(checkpoint, model)
    assert caught.value.hint


def test_the_hint_names_a_checkpoint_that_can_be_used_instead(checkpoint: Path, model: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(checkpoint.with_name("step_000004"), model)
    assert str(checkpoint) in caught.value.hint
