"""verl's keys for saving, keeping and resuming from checkpoints."""

from pathlib import Path

import pytest

from trainer.compat.settings import load_config
from trainer.config.sft import SftConfig
from trainer.errors import ConfigError


def test_save_freq_of_minus_one_saves_by_time_only_without_other_keys_of_verl() -> None:
    """verl's -1 means no checkpoints while the run goes on."""
    assert load_config([], ["trainer.save_freq=-1"])[0].trainer.minutes_between_saves == 15
    for line in (["actor_rollout_ref.actor.optim.lr=1e-6"], ["trainer.experiment_name=mine"]):
        trainer = load_config([], [*line, "trainer.save_freq=-1"])[0].trainer
        assert (trainer.save_freq, trainer.minutes_between_saves) == (-1, 0)
        assert load_config([], line)[0].trainer.minutes_between_saves == 15
        assert load_config([], [*line, "trainer.save_freq=20"])[0].trainer.save_freq == 20
        saving = load_config([], [*line, "trainer.save_freq=-1", "trainer.save_minutes=5"])[0].trainer
        assert saving.minutes_between_saves == 5


NAME = "trainer.experiment_name=mine"
STEP = "/runs/mine/checkpoints/step_000010"


@pytest.mark.parametrize(
    ("line", "resume"),
    [
        ([NAME], "auto"),
        ([NAME, "trainer.resume_mode=auto"], "auto"),
        (["trainer.run_id=mine", "trainer.resume_mode=auto"], "auto"),
        (["trainer.run_id=mine"], None),
        (["trainer.experiment_name=null"], None),
        ([NAME, "trainer.resume_mode=disable"], None),
        ([NAME, "trainer.resume=auto", "trainer.resume_mode=disable"], None),
        ([NAME, f"trainer.resume={STEP}"], Path(STEP)),
        ([NAME, f"trainer.resume_from_path={STEP}", "trainer.resume_mode=resume_path"], Path(STEP)),
        (["trainer.resume_mode=resume_path", f"trainer.resume_from_path={STEP}"], Path(STEP)),
        ([NAME, "trainer.resume_mode=disable", "trainer.resume_from_path=''"], None),
    ],
)
def test_a_run_with_verl_s_name_resumes_itself_unless_the_mode_says_otherwise(
    line: list[str], resume: Path | str | None
) -> None:
    config, notes = load_config([], line)
    assert config.trainer.resume == resume
    assert notes == []


def test_a_run_without_a_name_is_always_a_new_one() -> None:
    config, notes = load_config([], ["trainer.resume_mode=auto"])
    assert config.trainer.resume is None
    assert "always a new one" in notes[0]


def test_a_path_counts_only_in_its_mode() -> None:
    config, notes = load_config([], [NAME, "trainer.resume_from_path=checkpoints/"])
    assert config.trainer.resume == "auto"
    assert notes == ["trainer.resume_from_path has no effect: trainer.resume_mode is not resume_path"]
    tuning, notes = load_config([], [NAME, f"trainer.resume_from_path={STEP}"], SftConfig)
    assert (tuning.trainer.resume, notes) == (Path(STEP), [])  # sft_trainer reads it in mode auto as well
    tuning, notes = load_config([], [NAME, f"trainer.resume_from_path={STEP}", "trainer.resume_mode=auto"], SftConfig)
    assert (tuning.trainer.resume, notes) == (Path(STEP), [])


def test_modes_of_resuming_are_verl_s() -> None:
    for path in ([], ["trainer.resume_from_path=''"], ["trainer.resume_from_path=null"]):
        with pytest.raises(ConfigError, match="resume_mode=resume_path needs a checkpoint") as caught:
            load_config([], ["trainer.resume_mode=resume_path", *path])
        assert "trainer.resume_from_path" in caught.value.hint
    with pytest.raises(ConfigError, match="resume_mode=foo is not supported here") as caught:
        load_config([], ["trainer.resume_mode=foo"])
    assert caught.value.hint == "supported: disable, auto, resume_path"


@pytest.mark.parametrize(
    ("given", "kept"),
    [({"actor": "3"}, 3), ({"actor": "3", "critic": "5"}, 5), ({"actor": "3", "critic": "null"}, None)],
)
def test_the_larger_of_verl_s_numbers_of_checkpoints_counts(given: dict[str, str], kept: int | None) -> None:
    line = [f"trainer.max_{role}_ckpt_to_keep={number}" for role, number in given.items()]
    assert load_config([], line)[0].trainer.keep_checkpoints == kept
