"""Which of verl's keys and values are accepted, which with a note, and which are refused."""

import pytest

from trainer.compat.settings import load_config
from trainer.compat.verl.rules import Value
from trainer.compat.verl.translate import RULES
from trainer.config.overrides import settings
from trainer.config.tree import Config
from trainer.errors import ConfigError

SWITCHES_ON: dict[str, Value] = {
    "actor_rollout_ref.actor.ppo_mini_batch_size": "1",
    "actor_rollout_ref.actor.use_dynamic_bsz": "true",
    "actor_rollout_ref.actor.use_kl_loss": "true",
    "algorithm.use_kl_in_reward": "true",
    "critic.use_dynamic_bsz": "true",
    "reward_model.enable": "true",
    "trainer.experiment_name": "mine",
    "trainer.mode": "asynchronous",
}


@pytest.mark.parametrize("pattern", RULES)
def test_every_rule_produces_existing_settings(pattern: str) -> None:
    """Each rule is tried with values of every kind, and with every switch on that other keys depend on."""
    engine = next((name for name in ("veomni", "torchtitan") if f".{name}." in pattern), "megatron")
    switches = SWITCHES_ON | {"actor_rollout_ref.actor.strategy": engine, "critic.strategy": engine}
    known = {setting.key for setting in settings(Config)}
    tried = "true 1 null false {} token-mean vanilla gae vllm fsdp fixed k3 naive error token auto data_source 0 -1 "
    tried += "console adamw torch.optim constant tool_agent sync eager disabled default selective"
    translations = []
    for value in tried.split():
        try:
            translations.append(RULES[pattern](pattern, value, switches | {pattern: value}))
        except ConfigError:
            continue
    assert translations, "no value is accepted"
    assert {
        key
        for translation in translations
        for key in (*translation.settings, *translation.inherited, *translation.computed)
    } <= known


@pytest.mark.parametrize(
    "argument",
    [
        "actor_rollout_ref.model.override_config.attention_dropout=0.",
        "actor_rollout_ref.rollout.response_length=512",
        "actor_rollout_ref.rollout.response_length=${data.max_response_length}",
        "actor_rollout_ref.rollout.max_model_len=1024",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
        "data.image_key=images",
        "data.gen_batch_size=1024",
        "model_engine=dp",
        "hydra.searchpath=null",
    ],
)
def test_a_neutral_value_needs_no_note(argument: str) -> None:
    assert load_config(["verl"], [argument])[1] == load_config(["verl"], [])[1]


def test_keys_that_verl_leaves_open_are_accepted_with_a_note() -> None:
    keys = [
        "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space",
        "actor_rollout_ref.actor.profiler.tool_config.nsys.discrete",
        "ray_kwargs.ray_init.num_cpus",
    ]
    _, notes = load_config([], [f"{key}=1" for key in keys])
    assert [note.split(" has no effect: ")[0] for note in notes] == keys


@pytest.mark.parametrize("section", ["ray_kwargs.ray_init", "ray_init"])
def test_variables_and_packages_of_ray_s_processes_are_refused(section: str) -> None:
    for given in ("runtime_env.env_vars.API_URL=http://judge", "runtime_env={env_vars: {API_URL: 'http://judge'}}"):
        with pytest.raises(ConfigError, match=r"env_vars\.API_URL is not supported here") as caught:
            load_config([], [f"+{section}.{given}"])
        assert "export API_URL=VALUE" in caught.value.hint
        assert "reward.variables=[API_URL]" in caught.value.hint
    for given in ("pip=[sympy]", "pip.packages=[sympy]", "working_dir=/code", "uv=[sympy]", "py_modules=[/code]"):
        with pytest.raises(ConfigError, match=f"runtime_env.{given.partition('=')[0]}=.* is not supported here"):
            load_config([], [f"+{section}.runtime_env.{given}"])
    neutral = ["num_cpus=8", "runtime_env.py_executable=python", "runtime_env.env_vars={}", "runtime_env.pip=null"]
    notes = load_config([], [f"+{section}.{setting}" for setting in neutral])[1]
    assert [note.partition(" ")[0] for note in notes] == [
        f"{section}.{setting.partition('=')[0]}" for setting in neutral[:2]
    ]


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("data.image_patch_size=16", "rows with images are refused when they are read"),
        ("actor_rollout_ref.model.use_remove_padding=False", "rows are always packed without padding"),
    ],
)
def test_a_key_without_effect_is_accepted_with_the_reason(argument: str, reason: str) -> None:
    _, notes = load_config(["verl"], [argument])
    assert notes == [f"{argument.partition('=')[0]} has no effect: {reason}"]


@pytest.mark.parametrize(("merge", "lora"), [("True", "merged"), ("False", "adapters")])
def test_merged_adapters_are_merged_in_engines(merge: str, lora: str) -> None:
    config, notes = load_config(["verl"], [f"actor_rollout_ref.model.lora.merge={merge}"])
    assert (config.rollout.lora, notes) == (lora, [])


@pytest.mark.parametrize("key", ["max_model_len", "engine_kwargs.vllm.max_model_len"])
def test_an_engine_s_limit_has_no_effect_if_prompt_and_response_fit(key: str) -> None:
    limit = f"actor_rollout_ref.rollout.{key}"
    assert load_config(["verl"], [f"+{limit}=1024"])[1] == []
    with pytest.raises(ConfigError, match=r"data\.max_response_length, 1024"):
        load_config(["verl"], [f"+{limit}=1023"])


@pytest.mark.parametrize("section", ["data", "actor_rollout_ref.model", "critic.model"])
def test_trust_in_a_models_own_code_is_noted(section: str) -> None:
    assert load_config([], [f"{section}.trust_remote_code=False"])[1] == []
    _, notes = load_config([], [f"{section}.trust_remote_code=True"])
    assert "those that bring their own are refused" in notes[0]


def test_a_key_without_a_rule_is_accepted_with_verl_s_default_and_refused_with_another_value() -> None:
    key = "actor_rollout_ref.rollout.logprobs_mode"
    assert load_config([], [f"{key}=processed_logprobs"])[1] == []
    with pytest.raises(ConfigError, match=f"{key}=raw_logits is not supported here") as caught:
        load_config([], [f"{key}=raw_logits"])
    assert caught.value.hint == "supported: processed_logprobs"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("actor_rollout_ref.rollout.name=sglang", "supported: vllm"),
        ("actor_rollout_ref.actor.strategy=automodel", "supported: dp, fsdp, fsdp2, megatron, torchtitan, veomni"),
        ("algorithm.adv_estimator=vtrace", "supported: gae, gdpo, gpg, grpo"),
        ("actor_rollout_ref.rollout.repetition_penalty=1.1", "supported: 1"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gvpo", "supported: cispo, clip_cov"),
    ],
)
def test_a_value_that_asks_for_a_missing_feature_is_refused(argument: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [argument])
    assert f"{argument} is not supported here" in str(caught.value)
    assert words in caught.value.hint


@pytest.mark.parametrize(
    "argument",
    [
        "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={method: ngram}",
        "reward_model.reward_kwargs.scale=2",
        "data.image_key=pictures",
        "actor_rollout_ref.rollout.agent.default_agent_loop=my_agent",
        "actor_rollout_ref.model.override_config.attention_dropout=0.1",
        "critic.model.override_config.attention_dropout=0.1",
        "actor_rollout_ref.rollout.response_length=7",
        "actor_rollout_ref.rollout.max_model_len=600",
        "data.gen_batch_size=3",
        "trainer.device=npu",
    ],
)
def test_a_key_that_changes_the_result_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=argument.split("=")[0]):
        load_config(["verl"], [argument])


@pytest.mark.parametrize(
    ("argument", "feature"),
    [
        ("actor_rollout_ref.rollout.expert_parallel_size=8", "experts"),
        ("actor_rollout_ref.actor.freeze_vision_tower=True", "vision"),
        ("actor_rollout_ref.model.mtp.enable=True", "multi-token prediction"),
    ],
)
def test_a_refusal_names_the_feature(argument: str, feature: str) -> None:
    with pytest.raises(ConfigError, match=feature):
        load_config([], [argument])


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("critic.model.lora_rnk", "critic.model.lora_rank"),
        ("actor_rollout_ref.actor.optim.lr_warmup_stps", "actor_rollout_ref.actor.optim.lr_warmup_steps"),
        ("actor_rollout_ref.actor.fsdp_config.param_ofload", "actor_rollout_ref.actor.fsdp_config.param_offload"),
        ("actor_rollout_ref.rollout.multi_turn.max_turn", "actor_rollout_ref.rollout.multi_turn.max_turns"),
        ("reward_model.enabel", "reward_model.enable"),
        ("actor_rollout_ref.actor.ppo_mini_batchsize", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("trainer.profiler.enabel", "trainer.profiler.enable"),
        # Any key may follow reward_kwargs, but this one is a near miss of a key that has an effect.
        ("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_facto", "overlong_buffer_cfg.penalty_factor"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_key_that_was_meant(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [f"{typo}=1"])
    assert f"{typo}: there is no such setting" in str(caught.value)
    assert f"{meant}=VALUE" in caught.value.hint


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], ["algorithm.adv_estimator=mine", "trainer.val_onli=true"])
    assert "2 settings cannot be used" in str(caught.value)
    assert "algorithm.adv_estimator=mine is not supported here (supported: " in str(caught.value)
    assert "did you mean trainer.val_only=VALUE?" in str(caught.value)


def test_keys_of_releases_before_0_6_have_their_meaning() -> None:
    config, notes = load_config(
        ["verl"],
        [
            "trainer.nnodes=2",
            "trainer.n_gpus_per_node=4",
            "reward_model.enable=true",
            "reward_model.model.path=/models/reward",
            "reward_model.micro_batch_size=32",  # of all devices
            "actor_rollout_ref.actor.fsdp_config.grad_offload=false",
            "critic.model.fsdp_config.grad_offload=true",
            "actor_rollout_ref.profiler.discrete=false",
            "trainer.profile_steps=[1,2]",
        ],
    )
    assert config.reward.model.micro_batch_size == 4
    assert [note.split(" has no effect: ")[1] for note in notes if "grad_offload" in note] == [
        "gradients exist only during an update",
        "gradients exist only during an update",
    ]
    assert [note.split(" ")[0] for note in notes if note.endswith("trainer.profiler writes traces")] == [
        "actor_rollout_ref.profiler.discrete",
        "trainer.profile_steps",
    ]


@pytest.mark.parametrize(
    ("preset", "steps"), [("verl", 105), ("verl_dapo", 105), ("verl_megatron", 105), ("verl_fully_async", 109)]
)
def test_an_epoch_ends_with_its_last_whole_batch_as_in_verl(preset: str, steps: int) -> None:
    """7,473 rows fill 7 batches of 1,024; fully_async_policy draws single prompts, which leave no rest."""
    line = ["data.train_batch_size=1024", "trainer.total_epochs=15", "trainer.n_gpus_per_node=2"]
    config, _ = load_config([preset], line)
    assert config.steps(7473) == config.planned_steps(7473) == steps
