"""Configuration files of verl's own, as it composes and prints them."""

from pathlib import Path

from trainer.compat.settings import load_config

COMPOSED = """
actor_rollout_ref:
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    optim: {_target_: verl.workers.config.FSDPOptimizerConfig, lr: 2.0e-06}
  ref:
    strategy: ${actor_rollout_ref.actor.strategy}
    megatron:
      override_transformer_config: ${oc.select:actor_rollout_ref.actor.megatron.override_transformer_config,{}}
  rollout:
    _target_: verl.workers.config.RolloutConfig
    name: ???
    n: 4
reward:
  custom_reward_function: {path: null, name: compute_score}
reward_model: {reward_manager: null, enable: null, model: {path: null}}
custom_reward_function: {path: null, name: null}
critic:
  strategy: ???
  ppo_micro_batch_size_per_gpu: null
"""


def test_a_file_that_verl_composed_is_read(tmp_path: Path) -> None:
    file = tmp_path / "composed.yaml"
    file.write_text(COMPOSED)
    config, notes = load_config(["verl", str(file)], ["actor_rollout_ref.rollout.name=hf"])
    assert (config.actor.learning_rate, config.rollout.samples_per_prompt) == (2e-6, 4)
    assert (config.rollout.engine, config.reward.weight) == ("transformers", 1)
    assert notes == []


def test_a_value_that_is_missing_in_a_file_replaces_no_other(tmp_path: Path) -> None:
    file = tmp_path / "composed.yaml"
    file.write_text("actor_rollout_ref:\n  rollout:\n    n: ???\n")
    assert load_config(["verl", str(file)], [])[0].rollout.samples_per_prompt == 1
