"""Hydra's command line and files: signs before a key, values, interpolations, `defaults`."""

from pathlib import Path

import pytest

from trainer.compat.settings import hydra_files, load_config
from trainer.errors import ConfigError


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_plus_signs_do_not_change_a_setting(sign: str) -> None:
    assert load_config([], [f"{sign}actor.ppo_epochs=3"])[0].actor.ppo_epochs == 3


def test_a_tilde_removes_what_was_set_before(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("actor: {ppo_epochs: 3, lora: {rank: 8}}\n")
    config, _ = load_config([str(mine)], ["~actor.lora", "~actor.ppo_epochs=3"])
    assert (config.actor.ppo_epochs, config.actor.lora.rank) == (1, 0)
    with pytest.raises(ConfigError, match=r"~actor\.lora: no file or argument before it sets actor\.lora"):
        load_config([], ["~actor.lora"])


@pytest.mark.parametrize(
    ("argument", "resolved"),
    [
        ("data.max_response_length=${data.max_prompt_length}", 128),
        ("data.max_response_length=${actor_rollout_ref.rollout.max_num_seqs}", 256),  # verl's default
        ("data.max_response_length=${rollout.max_turns}", 8),  # our default
        ("data.max_response_length=${oc.env:LENGTH}", 99),
        ("data.max_response_length=${oc.env:NOT_SET,77}", 77),
        ("data.max_response_length=${oc.select:data.nothing,55}", 55),
        ("data.max_response_length=${.max_prompt_length}", 128),
    ],
)
def test_interpolations_are_replaced(argument: str, resolved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENGTH", "99")
    config, _ = load_config([], ["data.max_prompt_length=128", argument])
    assert config.data.max_response_length == resolved


def test_an_interpolation_may_be_a_part_of_a_text() -> None:
    config, _ = load_config(
        [], ["trainer.run_id=${trainer.project_name}-${data.max_prompt_length}", "data.max_prompt_length=5"]
    )
    assert config.trainer.run_id == "verl_examples-5"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("trainer.run_id=${oc.env:SURELY_NOT_SET}", "SURELY_NOT_SET is not set"),
        ("trainer.run_id=${no.such.key}", r"\$\{no\.such\.key\} names no setting"),
        ("trainer.run_id=${trainer.run_id}", "refer to each other"),
        ("algorithm.rollout_correction={a: [}", "not YAML"),
    ],
)
def test_what_has_no_value_is_refused(argument: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config([], [argument])


@pytest.mark.parametrize(
    "value", ["{rollout_is: token, rollout_is_threshold: 3}", "{rollout_is:token,rollout_is_threshold:3}"]
)
def test_a_mapping_sets_the_keys_below(value: str) -> None:
    algorithm = load_config([], [f"algorithm.rollout_correction={value}"])[0].algorithm
    assert (algorithm.correction, algorithm.model_dump()["correction_high"]) == ("tis", 3)


def test_a_file_may_be_based_on_another_and_on_verl_s_own(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("trainer: {total_epochs: 7, test_freq: 3}\n")
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [file://config]}\ndefaults: [ppo_trainer, base, _self_]\ntrainer: {test_freq: 9}\n"
    )
    (file,) = hydra_files("mine", str(tmp_path))
    config, _ = load_config([file], [])
    assert (config.trainer.total_epochs, config.trainer.test_freq) == (7, 9)
    assert config.data.max_response_length == 512  # verl's


def test_verl_s_own_configurations_are_presets() -> None:
    assert hydra_files("ppo_trainer", None) == ["verl"]
    _, notes = load_config(hydra_files("ppo_megatron_trainer.yaml", "config"), [])
    assert any(note.startswith("actor_rollout_ref.actor.strategy=megatron: ") for note in notes)


def test_a_group_of_another_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [{actor@actor_rollout_ref.actor: mine}]\n")
    with pytest.raises(ConfigError, match="selects a group of another tool's configuration"):
        load_config([str(tmp_path / "mine.yaml")], [])
