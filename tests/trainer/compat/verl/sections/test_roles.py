"""verl's keys for actor and critic: their engine, batches, models and adapters."""

from pathlib import Path

import pytest

from trainer.compat.settings import load_config
from trainer.errors import ConfigError

ROLES = ("actor", "critic")


def test_micro_batches_of_all_devices_are_divided() -> None:
    line = ["actor_rollout_ref.actor.ppo_micro_batch_size=64", "trainer.nnodes=2", "trainer.n_gpus_per_node=8"]
    assert load_config([], line)[0].actor.micro_batch_size == 4


def test_a_token_budget_has_an_effect_with_dynamic_batches() -> None:
    budgets = [f"{role}.ppo_max_token_len_per_gpu=9000" for role in ("actor_rollout_ref.actor", "critic")]
    off, notes = load_config([], budgets)
    assert (off.actor.micro_batch_tokens, off.critic.micro_batch_tokens, len(notes)) == (None, None, 2)
    on, _ = load_config([], [*budgets, "actor_rollout_ref.actor.use_dynamic_bsz=True"])
    assert (on.actor.micro_batch_tokens, on.critic.micro_batch_tokens) == (9000, 9000)


def test_our_keys_override_verl_s_defaults() -> None:
    config, _ = load_config(["verl"], ["rollout.samples_per_prompt=4", "algorithm.kl_coefficient=0.5"])
    assert config.actor.mini_batch_size == 256 * 4
    assert config.algorithm.kl_coefficient == 0.5


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("rollout.samples_per_prompt=4", "actor_rollout_ref.rollout.n=8"),
        ("actor_rollout_ref.rollout.n=4", "rollout.samples_per_prompt=8"),
    ],
)
def test_mini_batches_are_counted_with_the_later_number_of_samples(earlier: str, later: str) -> None:
    config, _ = load_config(["verl"], [earlier, later])
    assert (config.rollout.samples_per_prompt, config.actor.mini_batch_size) == (8, 256 * 8)


def test_a_number_of_samples_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["verl"], ["actor_rollout_ref.rollout.n=two", "critic.ppo_mini_batch_size=64"])
    assert str(caught.value) == "actor_rollout_ref.rollout.n=two: expected a whole number"
    assert caught.value.hint == "it counts responses to a prompt"


def test_a_mini_batch_that_does_not_divide_the_batch_is_named_in_prompts() -> None:
    mini, line = "actor_rollout_ref.actor.ppo_mini_batch_size", ["actor_rollout_ref.rollout.n=8"]
    with pytest.raises(ConfigError) as caught:
        load_config(["verl"], [*line, "data.train_batch_size=64"])
    assert str(caught.value) == f"{mini}=256 does not divide data.train_batch_size=64"
    assert caught.value.hint == f"{mini} counts prompts: make it divide data.train_batch_size"
    accepted, _ = load_config(
        ["verl"], [*line, "data.train_batch_size=64", *(f"{r}.mini_batch_size=256" for r in ROLES)]
    )
    assert accepted.actor.mini_batch_size == 256
    assert load_config(["verl"], [*line, "data.train_batch_size=64", f"{mini}=32"])[0].actor.mini_batch_size == 256


def test_a_role_s_own_setting_overrides_an_inherited_one() -> None:
    critic, actor = "critic.ppo_mini_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32"
    for arguments in ([critic, actor], [actor, critic]):
        config, _ = load_config([], ["rollout.samples_per_prompt=1", *arguments])
        assert (config.actor.mini_batch_size, config.critic.mini_batch_size) == (32, 64)


@pytest.mark.parametrize("section", ["override_config", "override_config.model_config"])
def test_entries_of_the_models_configuration_are_overridden(section: str) -> None:
    config, _ = load_config([], [f"+actor_rollout_ref.model.{section}.max_position_embeddings=32768"])
    assert config.model.override_config == {"max_position_embeddings": 32768}


def test_adapters_start_from_a_directory_and_leave_layers_out() -> None:
    config, _ = load_config(
        [],
        [
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.model.lora_adapter_path=/adapters/start",
            "actor_rollout_ref.model.exclude_modules=[down_proj]",
        ],
    )
    assert (config.actor.lora.path, config.actor.lora.exclude_modules) == (Path("/adapters/start"), ["down_proj"])
    config, _ = load_config([], ["actor_rollout_ref.model.exclude_modules=.*layers.1.*"])
    assert config.actor.lora.exclude_modules == [".*layers.1.*"]


@pytest.mark.parametrize(
    ("arguments", "deterministic"),
    [
        (["actor_rollout_ref.actor.fsdp_config.full_determinism=true", "critic.fsdp.full_determinism=false"], True),
        (["actor_rollout_ref.rollout.full_determinism=True"], True),
        (["actor_rollout_ref.ref.fsdp_config.full_determinism=false"], False),
    ],
)
def test_one_role_s_full_determinism_is_the_whole_run_s(arguments: list[str], deterministic: bool) -> None:
    config, _ = load_config([], arguments)
    assert config.trainer.deterministic is deterministic
