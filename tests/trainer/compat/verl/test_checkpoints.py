"""verl's keys for saving, keeping and resuming from checkpoints."""

import pytest

from trainer.config.overrides import load_config


def test_save_freq_of_minus_one_saves_by_time_only_without_other_keys_of_verl() -> None:
    """verl's -1 means no checkpoints while the run goes on."""
    assert load_config([], ["trainer.save_freq=-1"])[0].trainer.minutes_between_saves == 15
    for line in (["actor_rollout_ref.actor.optim.lr=1e-6"], ["trainer.experiment_name=mine"]):
        trainer = load_config([], [*line, "trainer.save_freq=-1"])[0].trainer
        assert (trainer.save_freq, trainer.minutes_between_saves) == (-1, 0)
        assert load_config([], line)[0].trainer.minutes_between_saves == 15
        assert load_config([], [*line, "trainer.save_freq=20"])[0].trainer.save_freq == 20
        own = load_config([], [*line, "trainer.save_freq=-1", "trainer.save_minutes=5"])[0].trainer
        assert own.minutes_between_saves == 5


def test_a_run_with_a_name_resumes_itself() -> None:
    config, _ = load_config([], ["trainer.resume_mode=auto", "trainer.experiment_name=mine"])
    assert config.trainer.resumes_itself
    config, notes = load_config([], ["trainer.resume_mode=auto"])
    assert config.trainer.resume is None
    assert "always a new one" in notes[0]


@pytest.mark.parametrize(
    ("given", "kept"),
    [({"actor": "3"}, 3), ({"actor": "3", "critic": "5"}, 5), ({"actor": "3", "critic": "null"}, None)],
)
def test_the_larger_of_verl_s_numbers_of_checkpoints_counts(given: dict[str, str], kept: int | None) -> None:
    line = [f"trainer.max_{role}_ckpt_to_keep={number}" for role, number in given.items()]
    assert load_config([], line)[0].trainer.keep_checkpoints == kept
