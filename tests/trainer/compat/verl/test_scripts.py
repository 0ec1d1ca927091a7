"""Keys and values as verl's published scripts write them."""

from pathlib import Path

import pytest

from trainer.compat.settings import load_config
from trainer.errors import ConfigError


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_with_one_response_to_a_prompt_the_advantage_is_the_score_and_a_note_says_so(estimator: str) -> None:
    config, notes = load_config(["verl"], [f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=1"])
    assert config.rollout.samples_per_prompt == 1
    assert notes == [
        f"rollout.samples_per_prompt=1: algorithm.advantage={estimator} compares the responses to a prompt, so with "
        "one the advantage is the raw score"
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


def test_responses_are_resampled_as_by_verl() -> None:
    line = ["algorithm.use_pf_ppo=True", "algorithm.pf_ppo.reweight_method=pow", "algorithm.pf_ppo.weight_pow=3.0"]
    config, notes = load_config(["verl"], ["algorithm.adv_estimator=gae", *line])
    assert (config.algorithm.resampling, config.algorithm.resampling_power, notes) == ("power", 3.0, [])
    assert load_config(["verl"], line[:1])[0].algorithm.resampling == "power"
    others, notes = load_config(["verl"], ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", *line])
    assert others.algorithm.resampling == "none"
    assert "verl resamples only with algorithm.adv_estimator=gae" in notes[0]
    with pytest.raises(ConfigError, match=r"reweight_method=best is not supported"):
        load_config(["verl"], ["algorithm.use_pf_ppo=True", "algorithm.pf_ppo.reweight_method=best"])


def test_the_optimal_token_baseline_needs_no_switch_for_its_statistics() -> None:
    config, notes = load_config(
        ["verl"],
        [
            "algorithm.adv_estimator=optimal_token_baseline",
            "actor_rollout_ref.actor.calculate_sum_pi_squared=True",
            "actor_rollout_ref.rollout.n=8",
        ],
    )
    assert config.algorithm.advantage == "optimal_token_baseline"
    assert config.needs_old_log_probs(step=2)
    assert "squared probabilities are computed where algorithm.advantage needs them" in notes[0]


def test_components_of_the_reward_are_named_as_in_verl() -> None:
    keys = ["algorithm.gdpo_reward_keys=[format,accuracy]", "algorithm.gdpo_reward_weights=[0.5,1.0]"]
    line = ["algorithm.adv_estimator=gdpo", "actor_rollout_ref.rollout.n=8", *keys]
    config, _ = load_config(["verl"], line)
    dumped = config.algorithm.model_dump()
    assert (dumped["reward_components"], dumped["component_weights"]) == (["format", "accuracy"], [0.5, 1.0])
    with pytest.raises(ConfigError, match=r"needs algorithm\.reward_components"):
        load_config(["verl"], line[:2])
    with pytest.raises(ConfigError, match=r"kl_coefficient has no effect with algorithm\.advantage=gdpo"):
        load_config(["verl"], [*line, "algorithm.use_kl_in_reward=True"])


MEGATRON = "actor_rollout_ref.actor.megatron.override_transformer_config"


@pytest.mark.parametrize(
    "field",
    ["recompute_granularity=full", "apply_rope_fusion=True", "attention_backend=auto", "moe_grouped_gemm=True"],
)
def test_fields_of_megatron_s_layers_that_choose_kernels_or_memory_are_noted(field: str) -> None:
    _, notes = load_config(["verl_megatron"], [f"+{MEGATRON}.{field}"])
    assert [note.split(": ")[0] for note in notes if MEGATRON in note] == [
        f"{MEGATRON}.{field.split('=')[0]} has no effect"
    ]


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("fp8=hybrid", "is not supported here"),
        ("hidden_dropout=0.1", "is not supported here"),
        ("context_parallel_size=2", "context_parallel_size=2 is not supported here"),
        ("moe_aux_loss_coeff=0.01", r"Megatron's loss is a mean over the tokens of a micro-batch"),
        ("moe_z_loss_coeff=0.001", r"that of actor\.router_z_loss one over responses"),
        ("moe_router_dtype=fp64", "moe_router_dtype=fp64 is not supported here"),
        ("normalization=LayerNorm", "the model's config.json decides"),
        ("window_size=512", "the model's config.json decides"),
    ],
)
def test_fields_of_megatron_s_layers_that_change_the_result_are_refused(field: str, reason: str) -> None:
    for section in (MEGATRON, MEGATRON.replace("actor.", "ref.", 1)):
        with pytest.raises(ConfigError, match=reason):
            load_config(["verl_megatron"], [f"+{section}.{field}"])
    name, _, value = field.partition("=")
    with pytest.raises(ConfigError, match=reason):
        load_config(["verl_megatron"], [f"+{MEGATRON}={{{name}: {value}}}"])


@pytest.mark.parametrize("form", ["+{}.moe_router_dtype=fp32", "+{}={{moe_router_dtype: fp32}}"])
def test_routers_compute_in_float32_as_megatron_s_do(form: str) -> None:
    critic = "critic.megatron.override_transformer_config"
    config, notes = load_config(["verl_megatron"], [form.format(MEGATRON)])
    assert (config.actor.router_dtype, config.critic.router_dtype) == ("float32", "model")
    assert any("routers are not rounded" in note for note in notes)
    assert load_config(["verl_megatron"], [form.format(critic)])[0].critic.router_dtype == "float32"


def test_a_reference_routes_as_the_actor_does() -> None:
    of_reference = MEGATRON.replace("actor.", "ref.", 1)
    both = [f"+{section}.moe_router_dtype=fp32" for section in (MEGATRON, of_reference)]
    assert load_config(["verl_megatron"], both)[0].actor.router_dtype == "float32"
    with pytest.raises(ConfigError, match="moe_router_dtype=fp32 is not supported here"):
        load_config(["verl_megatron"], both[1:])


def test_neutral_fields_of_megatron_s_layers_need_no_note() -> None:
    fields = ["fp8=False", "attention_dropout=0.0", "moe_aux_loss_coeff=0"]
    notes = load_config(["verl_megatron"], [f"+{MEGATRON}.{field}" for field in fields])[1]
    assert [note for note in notes if MEGATRON in note] == []
