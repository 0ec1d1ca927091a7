"""Keys and values as verl's published scripts write them."""

from pathlib import Path

import pytest

from trainer.config.overrides import load_config
from trainer.errors import ConfigError


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_with_one_response_to_a_prompt_the_advantage_is_the_score_and_a_note_says_so(estimator: str) -> None:
    config, notes = load_config(["verl"], [f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=1"])
    assert config.rollout.samples_per_prompt == 1
    assert notes == [
        f"rollout.samples_per_prompt=1: algorithm.advantage={estimator} has nothing to compare a response with, so its "
        "advantage is the plain score"
    ]
    assert load_config(["verl"], [f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=2"])[1] == []


def test_where_verl_gives_a_single_response_no_advantage_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="rloo_vectorized gives a single response the advantage 0"):
        load_config(["verl"], ["algorithm.adv_estimator=rloo_vectorized", "actor_rollout_ref.rollout.n=1"])
    with pytest.raises(ConfigError, match="grpo_passk compares responses"):
        load_config(["verl"], ["algorithm.adv_estimator=grpo_passk", "actor_rollout_ref.rollout.n=1"])


@pytest.mark.parametrize("never", ["False", "false", "-1"])
def test_false_is_no_frequency_of_validations(never: str) -> None:
    assert load_config(["verl"], [f"trainer.test_freq={never}"])[0].trainer.test_freq == -1


def test_the_model_s_type_is_the_one_in_which_roles_compute() -> None:
    config, notes = load_config(["verl"], ["actor_rollout_ref.model.torch_dtype=bfloat16"])
    assert (config.model.dtype, config.actor.weights_dtype) == ("bfloat16", "float32")
    assert "trained weights have actor.weights_dtype" in notes[0]
    with pytest.raises(ConfigError, match="contradicts"):
        load_config(["verl"], ["actor_rollout_ref.model.torch_dtype=bfloat16", "actor_rollout_ref.rollout.dtype=fp16"])


def test_an_empty_switch_counts_as_false() -> None:
    config, notes = load_config(["verl"], ["actor_rollout_ref.actor.use_kl_loss="])
    assert config.actor.kl_loss_coefficient == 0
    assert notes == ["actor_rollout_ref.actor.use_kl_loss is empty, which counts as false"]


def test_an_adapter_to_start_from_brings_its_own_rank() -> None:
    config, _ = load_config(["verl"], ["actor_rollout_ref.model.lora_adapter_path=/adapters/start"])
    assert (config.actor.lora.path, config.actor.lora.rank) == (Path("/adapters/start"), 0)
