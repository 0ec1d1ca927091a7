"""OpenRLHF's PPO command, `openrlhf.cli.train_ppo_ray`, as of its version 0.11."""

import json
from collections.abc import Sequence
from pathlib import Path

from trainer.compat.command_lines import Tool
from trainer.compat.verl.rules import Given, Rule, Translation, Value, mapped, no_effect, refused, to, word
from trainer.errors import ConfigError

MODULE = "openrlhf.cli.train_ppo_ray"
# Larger than any ratio: log-ratios are clamped to 20.
NO_DUAL_CLIP = 1e9
_WITHOUT_CRITIC: dict[str, dict[str, Value]] = {
    "reinforce": {"algorithm.advantage": "reinforce_plus_plus"},
    "rloo": {"algorithm.advantage": "rloo"},
    "reinforce_baseline": {"algorithm.advantage": "reinforce_plus_plus_baseline"},
    "group_norm": {"algorithm.advantage": "grpo", "algorithm.divide_by_std": True},
    "dr_grpo": {"algorithm.advantage": "grpo", "algorithm.divide_by_std": False},
}


def estimator(key: str, value: Value, given: Given) -> Translation:
    name, kl_in_reward = word(value), given["algo.kl.init_coef"] and not given["algo.kl.use_loss"]
    if name == "gae":
        return Translation({"algorithm.advantage": "gae", "algorithm.whiten_advantages": True})
    if name not in _WITHOUT_CRITIC:
        raise ConfigError(
            f"--{key} {value} is not supported here", hint=f"supported: gae, {', '.join(_WITHOUT_CRITIC)}"
        )
    note = ""
    if kl_in_reward and name in ("rloo", "group_norm", "dr_grpo"):
        note = f"{key} {name}: the baseline includes the KL in the reward; OpenRLHF adds the KL after the baseline"
    return Translation(dict(_WITHOUT_CRITIC[name]), note)


def only_with_critic(ours: str) -> Rule:
    """A setting of the critic, which only `gae` has."""

    def rule(_key: str, value: Value, given: Given) -> Translation:
        return Translation({ours: value} if given["algo.advantage.estimator"] == "gae" and value is not None else {})

    return rule


def kl_coefficient(_key: str, value: Value, given: Given) -> Translation:
    as_loss = given["algo.kl.use_loss"]
    return Translation(
        {"algorithm.kl_coefficient": 0.0 if as_loss else value, "actor.kl_loss_coefficient": value if as_loss else 0.0}
    )


def kl_target(_key: str, value: Value, given: Given) -> Translation:
    if value is None:
        return Translation({})
    horizon = given["algo.kl.horizon"]
    control = {"kl_control": "adaptive", "kl_target": value, "kl_horizon": horizon}
    return Translation({f"algorithm.{name}": one for name, one in control.items()})


def clip_low_high(key: str, value: Value, _given: Given) -> Translation:
    if not value:
        return Translation({})
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"--{key} {value}: expected two numbers", hint="give the low and the high clip range")
    return Translation({"actor.clip_ratio_low": value[0], "actor.clip_ratio_high": value[1]})


def prompt_length(_key: str, value: Value, given: Given) -> Translation:
    """OpenRLHF limits prompt and response together."""
    response = given["rollout.max_new_tokens"]
    if not isinstance(value, int) or not isinstance(response, int) or response >= value:
        raise ConfigError(
            "--rollout.max_new_tokens: this trainer needs a limit of each response, below --data.max_len",
            hint="set --rollout.max_new_tokens",
        )
    return Translation({"data.max_response_length": response, "data.max_prompt_length": value - response})


def correction(key: str, value: Value, given: Given) -> Translation:
    level, mode, gating = (word(given[f"algo.advantage.is_correction_{part}"]) for part in ("level", "mode", "gating"))
    if level == "off":
        return Translation({"algorithm.correction": "none"})
    bounds = given["algo.advantage.is_correction_threshold"]
    if gating != "ratio" or level != "token" or mode != "mask" or not isinstance(bounds, list) or len(bounds) != 2:
        raise ConfigError(
            f"--{key} {value} with mode {mode}, gating {gating} and threshold {bounds} is not supported here",
            hint="supported: level token, mode mask, gating ratio and two bounds (icepop)",
        )
    low, high = bounds
    kind = {"correction": "icepop", "correction_low": low, "correction_high": high}
    return Translation({f"algorithm.{name}": one for name, one in kind.items()})


def evaluation(_key: str, value: Value, given: Given) -> Translation:
    """OpenRLHF evaluates only with a dataset for it."""
    if value is None:
        return Translation({}, "eval.dataset is not given: set data.validation_files, which this trainer requires")
    own = {"temperature": given["eval.temperature"], "samples": given["eval.n_samples_per_prompt"]}
    return Translation({"data.validation_files": [value], **{f"validation.{name}": one for name, one in own.items()}})


def critic_model(_key: str, value: Value, given: Given) -> Translation:
    """Without a model of its own, the critic starts from the reward model."""
    if given["algo.advantage.estimator"] != "gae":
        return Translation({})
    start = value or given["reward.model_name_or_path"]
    return Translation({"critic.path": start} if start else {})


def reward_model(key: str, value: Value, _given: Given) -> Translation:
    if value is None:
        return Translation({})
    note = f"{key}: the model must be a Transformers sequence classifier with one label; rewards are not clipped"
    return Translation({"reward.model.path": value, "reward.weight": 0.0}, note)


def remote_reward(key: str, value: Value, _given: Given) -> Translation:
    if value is None:
        return Translation({})
    own = "custom_function.path: compute_score(data_source, solution_str, ground_truth, extra_info)"
    raise ConfigError(
        f"--{key} {value}: OpenRLHF calls rewards with other arguments",
        hint=f"write the function for reward.{own}, or a server for reward.server.url",
    )


def asynchronous(key: str, value: Value, given: Given) -> Translation:
    if not value:
        return Translation({"trainer.mode": "synchronous"})
    if given["train.partial_rollout_enable"] or given["train.async_queue_size"] != 1:
        raise ConfigError(
            f"--{key} with a queue of several batches or partial rollouts is not supported here",
            hint="set trainer.mode=asynchronous and trainer.max_staleness",
        )
    return Translation({"trainer.mode": "one_step_off"})


def adapters(key: str, value: Value, given: Given) -> Translation:
    if not value:
        return Translation({})
    roles = ("actor", "critic") if given["algo.advantage.estimator"] == "gae" else ("actor",)
    return Translation({f"{role}.lora.{key.rpartition('.')[2]}": value for role in roles})


def adapter_alpha(key: str, value: Value, given: Given) -> Translation:
    return adapters(key, value, given) if given["ds.lora.rank"] else Translation({})


def role_rules(role: str) -> dict[str, Rule]:
    """Optimizer and schedule of a role."""
    setting = to if role == "actor" else only_with_critic
    return {
        f"{role}.adam.lr": setting(f"{role}.learning_rate"),
        f"{role}.adam.betas": setting(f"{role}.optimizer.betas"),
        f"{role}.adam.eps": setting(f"{role}.optimizer.epsilon"),
        f"{role}.adam.weight_decay": setting(f"{role}.weight_decay"),
        f"{role}.max_norm": setting(f"{role}.max_gradient_norm"),
        f"{role}.lr_scheduler": _schedule(role),
        f"{role}.lr_warmup_ratio": setting(f"{role}.schedule.warmup_ratio"),
        f"{role}.min_lr_ratio": lambda _key, _value, _given: Translation({}),  # of the schedule
    }


def _schedule(role: str) -> Rule:
    names = {"cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear"}
    names |= {"constant": "constant", "constant_with_warmup": "constant"}

    def rule(key: str, value: Value, given: Given) -> Translation:
        chosen = mapped(names, f"{role}.schedule.name")(f"--{key}", value, given).settings
        if word(value) == "cosine_with_min_lr":
            chosen[f"{role}.schedule.min_ratio"] = given[f"{role}.min_lr_ratio"]
        return Translation({} if role == "critic" and given["algo.advantage.estimator"] != "gae" else chosen)

    return rule


_FACTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
DEFAULTS: dict[str, Value] = _FACTS["defaults"]
# Parts of other arguments, which read them.
_READ_ELSEWHERE = (
    "algo.kl.use_loss",
    "algo.kl.horizon",
    "algo.advantage.is_correction_mode",
    "algo.advantage.is_correction_gating",
    "algo.advantage.is_correction_threshold",
    "train.async_queue_size",
    "train.partial_rollout_enable",
    "train.ema_beta",
    "rollout.max_new_tokens",
    "eval.temperature",
    "eval.n_samples_per_prompt",
    "data.max_images_per_prompt",
    "data.image_key",
    "ds.ring_attn_head_stride",
    *(f"{role}.muon.{name}" for role in ("actor", "critic") for name in ("lr", "momentum", "ns_steps", "nesterov")),
)


def _in_two(first: str, second: str) -> Rule:
    """The same value for actor and critic; the critic's only where there is one."""

    def rule(_key: str, value: Value, given: Given) -> Translation:
        names = (first, second) if given["algo.advantage.estimator"] == "gae" else (first,)
        return Translation(dict.fromkeys(names, value))

    return rule


def _if_positive(ours: str) -> Rule:
    return lambda _key, value, _given: Translation({ours: value} if isinstance(value, int) and value > 0 else {})


def _if_given(ours: str) -> Rule:
    return lambda _key, value, _given: Translation({} if value is None else {ours: value})


def _entropy(_key: str, value: Value, _given: Given) -> Translation:
    return Translation({"actor.entropy_coefficient": value or 0.0})


def _dual_clip(_key: str, value: Value, given: Given) -> Translation:
    if word(given["actor.policy_loss_type"]) != "ppo":
        return Translation({})
    return Translation({"actor.clip_dual": NO_DUAL_CLIP if value is None else value})


def _kl_estimator(_key: str, value: Value, given: Given) -> Translation:
    if given["algo.kl.use_loss"]:
        return Translation({"actor.kl_loss_estimator": value})
    return Translation({"algorithm.kl_estimator": value})


def _overlong(_key: str, value: Value, given: Given) -> Translation:
    if value is None:
        return Translation({})
    penalty = given["reward.overlong_penalty_factor"]
    return Translation({"reward.overlong_buffer": int(str(value).split(".")[0]), "reward.overlong_penalty": penalty})


def _filtering(key: str, value: Value, given: Given) -> Translation:
    if not value:
        return Translation({})
    if given["algo.dynamic_filtering_range"] != [0, 1]:
        raise ConfigError(
            f"--algo.dynamic_filtering_range {given['algo.dynamic_filtering_range']} is not supported here",
            hint="algorithm.dynamic_sampling keeps prompts whose responses differ in reward",
        )
    note = f"{key}: prompts are kept if their responses differ in reward; OpenRLHF keeps mean rewards inside 0 to 1"
    return Translation({"algorithm.dynamic_sampling": True}, note)


def _resume(key: str, value: Value, given: Given) -> Translation:
    if not value:
        return Translation({})
    if given["logger.wandb.run_name"] is None:
        raise ConfigError(f"--{key}: a run without a name is always a new one", hint="set --logger.wandb.run_name")
    return Translation({"trainer.resume": "auto"})


def _prompts(key: str, value: Value, given: Given) -> Translation:
    if value is None:
        raise ConfigError(f"--{key} is not given", hint="name the training data")
    label = given["data.label_key"] or "the answer"
    note = f"{key}: give each row reward_model.ground_truth ({label}) and data_source, and messages as a prompt"
    return Translation({"data.train_files": [value]}, note)


def _chat_template(key: str, value: Value, _given: Given) -> Translation:
    note = f"{key}: every prompt is rendered with the model's chat template; OpenRLHF takes it as plain text"
    return Translation({}, "" if value else note)


def _clip_range(key: str, value: Value, _given: Given) -> Translation:
    if value != [-10, 10]:
        raise ConfigError(f"--{key} {value} is not supported here", hint="rewards are not clipped")
    return Translation({}, f"{key}: rewards are not clipped; OpenRLHF clips them to -10 and 10")


def _wandb(_key: str, value: Value, _given: Given) -> Translation:
    return Translation({} if value is None else {"trainer.loggers": ["wandb"]})


def _normalized(key: str, value: Value, _given: Given) -> Translation:
    if value:
        raise ConfigError(f"--{key} is not supported here", hint="set algorithm.whiten_advantages=false for gae")
    return Translation({})


RULES: dict[str, Rule] = {
    **{name: no_effect(reason) for name, reason in _FACTS["without_effect"].items()},
    **dict.fromkeys(_READ_ELSEWHERE, lambda _key, _value, _given: Translation({})),
    **role_rules("actor"),
    **role_rules("critic"),
    "actor.num_nodes": to("trainer.nnodes"),
    "actor.num_gpus_per_node": to("trainer.n_gpus_per_node"),
    "vllm.tensor_parallel_size": to("rollout.tensor_parallel"),
    "algo.advantage.is_correction_level": correction,
    "train.async_enable": asynchronous,
    "eval.steps": to("trainer.test_freq"),
    "ckpt.save_steps": to("trainer.save_freq"),
    "ckpt.max_num": to("trainer.keep_checkpoints"),
    "ckpt.load_enable": _resume,
    "ckpt.output_dir": to("trainer.output_dir"),
    "actor.gradient_checkpointing_enable": _in_two("actor.activation_checkpointing", "critic.activation_checkpointing"),
    "ds.param_dtype": mapped({"bf16": "bfloat16", "fp16": "float16"}, "model.dtype"),
    "ds.tensor_parallel_size": _in_two("actor.sharding.tensor_parallel", "critic.sharding.tensor_parallel"),
    "ds.lora.rank": adapters,
    "ds.lora.alpha": adapter_alpha,
    "ds.lora.target_modules": adapter_alpha,
    "train.num_episodes": to("trainer.total_epochs"),
    "rollout.batch_size": to("data.train_batch_size"),
    "train.max_epochs": _in_two("actor.ppo_epochs", "critic.ppo_epochs"),
    "train.batch_size": _in_two("actor.mini_batch_size", "critic.mini_batch_size"),
    "data.max_len": prompt_length,
    "data.max_samples": to("data.train_max_samples"),
    "actor.eps_clip": to("actor.clip_ratio"),
    "actor.eps_clip_low_high": clip_low_high,
    "actor.dual_clip": _dual_clip,
    "critic.value_clip": only_with_critic("critic.clip_range_value"),
    "algo.advantage.lambd": only_with_critic("algorithm.lam"),
    "algo.advantage.gamma": only_with_critic("algorithm.gamma"),
    "rollout.top_p": to("rollout.top_p"),
    "rollout.temperature": to("rollout.temperature"),
    "train.seed": to("trainer.seed"),
    "critic.freezing_steps": _if_positive("trainer.critic_warmup"),
    "rollout.n_samples_per_prompt": to("rollout.samples_per_prompt"),
    "algo.kl.target": kl_target,
    "algo.kl.init_coef": kl_coefficient,
    "algo.kl.estimator": _kl_estimator,
    "algo.kl.unbiased_gradient": to("actor.kl_loss_unbiased"),
    "actor.policy_loss_type": mapped({"ppo": "ppo", "gspo": "gspo"}, "actor.policy_loss"),
    "actor.loss_agg_mode": to("actor.loss_aggregation"),
    "actor.entropy_coef": _entropy,
    "algo.advantage.estimator": estimator,
    "reward.clip_range": _clip_range,
    "reward.normalize_enable": _normalized,
    "reward.overlong_buffer_len": _overlong,
    "reward.overlong_penalty_factor": lambda _key, _value, _given: Translation({}),
    "actor.model_name_or_path": to("model.path"),
    "critic.model_name_or_path": critic_model,
    "reward.model_name_or_path": reward_model,
    "reward.remote_url": remote_reward,
    "train.agent_func_path": refused("write an environment for rollout.environment.path"),
    "data.prompt_dataset": _prompts,
    "eval.dataset": evaluation,
    "data.input_key": to("data.prompt_key"),
    "data.label_key": no_effect("ground truths are in reward_model.ground_truth"),
    "data.input_template": refused("set data.chat_template, which every prompt is rendered with"),
    "data.apply_chat_template": _chat_template,
    "logger.wandb.key": _wandb,
    "logger.wandb.project": to("trainer.project_name"),
    "logger.wandb.run_name": _if_given("trainer.run_id"),
    "algo.dynamic_filtering_enable": _filtering,
    "algo.dynamic_filtering_range": lambda _key, _value, _given: Translation({}),
}


def _starts(entry: str, _arguments: Sequence[str]) -> str | None:
    return "train" if entry in (MODULE, f"{MODULE.replace('.', '/')}.py") else None


ROW = Tool(name="OpenRLHF", starts=_starts, defaults=lambda _command: DEFAULTS, rules=lambda _command: RULES)
