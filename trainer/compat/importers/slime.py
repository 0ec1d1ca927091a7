"""slime's command `train.py`, as of August 2026, with the arguments of Megatron-LM and SGLang that its scripts use."""

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from trainer.compat.command_lines import Tool
from trainer.compat.verl.rules import KL_KINDS, Given, Rule, Translation, Value, mapped, no_effect, refused, to, word
from trainer.errors import ConfigError

NO_DUAL_CLIP = 1e9  # larger than any ratio
LONGEST_PROMPT = 1024  # where slime has no limit
_FACTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
DEFAULTS: dict[str, Value] = _FACTS["defaults"]
_OURS = {
    "grpo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "ppo": "gae",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
_REWARDS = {"math": "math", "deepscaler": "math", "dapo": "dapo", "f1": "qa_f1", "gpqa": "multiple_choice"}
_FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"
_OWN_REWARD = "compute_score(data_source, solution_str, ground_truth, extra_info) for reward.custom_function.path"


def has_critic(given: Given) -> bool:
    return word(given["advantage_estimator"]) == "ppo"


def estimator(key: str, value: Value, given: Given) -> Translation:
    """slime's word chooses the policy loss as well."""
    name, whitened = word(value), bool(given["normalize_advantages"])
    chosen = mapped(_OURS, "algorithm.advantage")(f"--{key}", value, given).settings
    if _OURS[name] == "grpo":
        chosen["algorithm.divide_by_std"] = not given["disable_grpo_std_normalization"]
    elif name == "ppo":
        chosen["algorithm.whiten_advantages"] = whitened
    if whitened != name.startswith("reinforce") and name != "ppo":
        raise ConfigError(
            f"--{key} {name} {'with' if whitened else 'without'} --normalize_advantages is not supported here",
            hint="reinforce_plus_plus and its baseline normalize advantages, grpo, gspo and cispo do not",
        )
    loss = name if name in ("gspo", "cispo") else "ppo"
    return Translation({**chosen, "actor.policy_loss": loss})


def dual_clip(key: str, value: Value, given: Given) -> Translation:
    if word(given["advantage_estimator"]) not in ("gspo", "cispo"):
        return Translation({"actor.clip_dual": NO_DUAL_CLIP if value is None else value})
    if value is not None:
        raise ConfigError(f"--{key} {value}: {given['advantage_estimator']} has no dual clip here", hint="remove it")
    return Translation({})


def clip_high(_key: str, value: Value, given: Given) -> Translation:
    if value is None:
        return Translation({})
    return Translation({"actor.clip_ratio_low": given["eps_clip"], "actor.clip_ratio_high": value})


def kl_in_reward(key: str, value: Value, given: Given) -> Translation:
    """Group-relative advantages ignore slime's KL in the reward."""
    if _OURS.get(word(given["advantage_estimator"])) != "grpo" or not value:
        kind = mapped(KL_KINDS, "algorithm.kl_estimator")("--kl_loss_type", given["kl_loss_type"], given).settings
        return Translation({"algorithm.kl_coefficient": value, **(kind if value else {})})
    note = f"{key} has no effect: slime's {given['advantage_estimator']} ignores it"
    return Translation({"algorithm.kl_coefficient": 0.0}, note, ignored=True)


def kl_loss(_key: str, value: Value, given: Given) -> Translation:
    coefficient = given["kl_loss_coef"]
    if not value or not coefficient:
        return Translation({"actor.kl_loss_coefficient": 0.0})
    kind = mapped(KL_KINDS, "actor.kl_loss_estimator")("--kl_loss_type", given["kl_loss_type"], given).settings
    # slime's gradient is that of the estimator itself.
    return Translation({"actor.kl_loss_coefficient": coefficient, "actor.kl_loss_unbiased": False, **kind})


def correction(_key: str, value: Value, given: Given) -> Translation:
    if not value:
        return Translation({"algorithm.correction": "none"})
    if given["tis_clip_low"]:
        raise ConfigError(f"--tis_clip_low {given['tis_clip_low']} is not supported here", hint="only --tis_clip is")
    return Translation({"algorithm.correction": "tis", "algorithm.correction_high": given["tis_clip"]})


def mini_batch(key: str, value: Value, given: Given) -> Translation:
    """Responses per optimizer step: as such, or by the number of steps."""
    prompts, group, steps = (
        given[name] for name in ("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout")
    )
    if isinstance(steps, int) and isinstance(prompts, int) and isinstance(group, int) and steps > 0:
        value = prompts * group // steps
    if not isinstance(value, int):
        raise ConfigError(
            f"--{key} is not given: it depends on the number of GPUs", hint=f"set --{key} or --num_steps_per_rollout"
        )
    return Translation({f"{role}.mini_batch_size": value for role in _roles(given)})


def prompts(key: str, value: Value, given: Given) -> Translation:
    if value is None:
        raise ConfigError(f"--{key} is not given", hint="name the training data")
    label = given["label_key"] or "the answer"
    note = f"{key}: give each row reward_model.ground_truth ({label}) and data_source, and messages as a prompt"
    return Translation({"data.train_files": [value]}, note)


def prompt_length(key: str, value: Value, given: Given) -> Translation:
    """slime filters longer prompts where it has a limit; its limit of a context covers prompt and response."""
    response, context = given["rollout_max_response_len"], given["rollout_max_context_len"]
    if value is None and isinstance(context, int) and isinstance(response, int) and context > response:
        note = f"rollout_max_context_len {context}: prompts have at most {context - response} tokens, longer ones are "
        filtered: dict[str, Value] = {"data.overlong_prompts": "filter", "data.max_prompt_length": context - response}
        return Translation(filtered, note + "left out; slime shortens their responses")
    if value is None:
        note = f"{key} is not given: prompts of more than {LONGEST_PROMPT} tokens are refused; slime has no limit"
        return Translation({"data.max_prompt_length": LONGEST_PROMPT}, note)
    return Translation({"data.max_prompt_length": value, "data.overlong_prompts": "filter"})


def response_length(key: str, value: Value, _given: Given) -> Translation:
    if value is None:
        raise ConfigError(f"--{key} is not given: this trainer needs a limit of each response", hint=f"set --{key}")
    return Translation({"data.max_response_length": value})


def evaluation(key: str, value: Value, given: Given) -> Translation:
    """slime samples validation as it samples training unless told otherwise. Names and paths take turns."""
    if not isinstance(value, list) or not value:
        return Translation({}, f"{key} is not given: set data.validation_files, which this trainer requires")
    sampling: dict[str, Value] = {
        f"validation.{ours}": given[f"eval_{ours}"] if given[f"eval_{ours}"] is not None else given[f"rollout_{ours}"]
        for ours in ("temperature", "top_p", "top_k")
    }
    if sampling["validation.top_k"] in (-1, 0):
        del sampling["validation.top_k"]
    samples = {"validation.samples": given["n_samples_per_eval_prompt"]}
    return Translation({"data.validation_files": value[1::2], **samples, **sampling})


def evaluation_length(key: str, value: Value, given: Given) -> Translation:
    ours = given["rollout_max_response_len"]
    if value is None or value == ours:
        return Translation({})
    return Translation({}, f"{key} {value}: responses of a validation have at most {ours} tokens, too")


def reward(key: str, value: Value, given: Given) -> Translation:
    name = word(value)
    if given["custom_rm_path"] is not None:
        return Translation({})
    if name == "remote_rm":
        raise ConfigError(
            f"--{key} {name}: slime sends other requests to {given['rm_url']}", hint="set reward.server.url"
        )
    if name == "null":
        raise ConfigError(f"--{key} is not given", hint=f"known: {', '.join(_REWARDS)}")
    note = f"{key} {name}: {_REWARDS.get(name)} finds and compares answers with its own parser"
    return Translation(mapped(_REWARDS, "reward.name")(f"--{key}", value, given).settings, note)


def own_reward(key: str, value: Value, _given: Given) -> Translation:
    if value is None:
        return Translation({})
    raise ConfigError(f"--{key} {value}: slime calls rewards with other arguments", hint=f"write {_OWN_REWARD}")


def filtering(key: str, value: Value, _given: Given) -> Translation:
    if value is None:
        return Translation({})
    if value != f"{_FILTERS}.check_reward_nonzero_std":
        raise ConfigError(
            f"--{key} {value} is not supported here",
            hint=f"supported: {_FILTERS}.check_reward_nonzero_std, as algorithm.dynamic_sampling",
        )
    return Translation({"algorithm.dynamic_sampling": True})


def sampler(key: str, value: Value, _given: Given) -> Translation:
    if value == DEFAULTS[key]:
        return Translation({})
    hint = "write an environment for rollout.environment.path"
    if "fully_async" in word(value):
        hint = "set trainer.mode=asynchronous and trainer.max_staleness"
    elif "sft" in word(value):
        hint = "write a line for this trainer's own fine-tuning: python -m trainer sft"
    raise ConfigError(f"--{key} {value} is not supported here", hint=hint)


def schedule(key: str, value: Value, given: Given) -> Translation:
    names = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
    own = mapped(names, "name")(f"--{key}", value, given).settings
    rate, lowest, share = given["lr"], given["min_lr"], given["lr_warmup_fraction"]
    if own["name"] != "constant" and isinstance(rate, int | float) and isinstance(lowest, int | float) and rate:
        own["min_ratio"] = lowest / rate
    own |= {"warmup_steps": given["lr_warmup_iters"]} if share is None else {"warmup_ratio": share}
    return Translation({f"{role}.schedule.{name}": one for name, one in own.items() for role in _roles(given)})


def optimizer(key: str, value: Value, given: Given) -> Translation:
    own = mapped({"adam": "adamw", "sgd": "sgd"}, "name")(f"--{key}", value, given).settings
    if own["name"] == "adamw":
        own |= {"betas": [given["adam_beta1"], given["adam_beta2"]], "epsilon": given["adam_eps"]}
    return Translation({f"{role}.optimizer.{name}": one for name, one in own.items() for role in _roles(given)})


def of_trained(name: str) -> Rule:
    """The same value for the actor and for the critic, where there is one: slime's arguments are those of both."""
    return lambda _key, value, given: Translation({f"{role}.{name}": value for role in _roles(given)})


def only_with_critic(ours: str) -> Rule:
    return lambda _key, value, given: Translation({ours: value} if has_critic(given) else {})


def discount(_key: str, value: Value, given: Given) -> Translation:
    reads_it = word(given["advantage_estimator"]) in ("ppo", "reinforce_plus_plus")
    return Translation({"algorithm.gamma": value} if reads_it else {})


def _roles(given: Given) -> tuple[str, ...]:
    return ("actor", "critic") if has_critic(given) else ("actor",)


def aggregation(_key: str, value: Value, given: Given) -> Translation:
    chosen: Value = "token-mean" if value else "seq-mean-token-mean"
    return Translation({f"{role}.loss_aggregation": chosen for role in _roles(given)})


def directory(_key: str, value: Value, given: Given) -> Translation:
    """slime continues from the checkpoints in the directory that it saves to."""
    if value is None:
        return Translation({})
    path = PurePosixPath(str(value))
    found: dict[str, Value] = {"trainer.output_dir": str(path.parent), "trainer.run_id": path.name}
    same = given["load"] is not None and PurePosixPath(str(given["load"])) == path
    return Translation({**found, "trainer.resume": "auto"} if same else found)


def load(key: str, value: Value, given: Given) -> Translation:
    if value is None or PurePosixPath(str(value)) == PurePosixPath(str(given["save"])):
        return Translation({})
    raise ConfigError(
        f"--{key} {value}: checkpoints of Megatron cannot be read",
        hint="convert it to a Hugging Face model and name it as --hf_checkpoint",
    )


def reference(key: str, value: Value, _given: Given) -> Translation:
    if value is None:
        return Translation({})
    return Translation({}, f"{key} {value}: policy and reference start from --hf_checkpoint, whose weights it holds")


def batches_of_training(key: str, value: Value, given: Given) -> Translation:
    if value is not None:
        return Translation({"trainer.total_steps": value})
    if given["num_epoch"] is None:
        raise ConfigError(f"--{key} is not given", hint="set --num_rollout or --num_epoch")
    return Translation({"trainer.total_epochs": given["num_epoch"]})


def template(key: str, value: Value, _given: Given) -> Translation:
    note = f"{key}: every prompt is rendered with the model's chat template; slime takes it as plain text"
    return Translation({}, "" if value else note)


def template_arguments(key: str, value: Value, _given: Given) -> Translation:
    if value is None:
        return Translation({})
    try:
        return Translation({"data.chat_template_kwargs": json.loads(str(value))})
    except json.JSONDecodeError as error:
        raise ConfigError(f"--{key} {value}: is not JSON: {error}", hint="write a JSON object") from error


def no_dropout(key: str, value: Value, _given: Given) -> Translation:
    if value != 0:
        raise ConfigError(f"--{key} {value}: there is no dropout here; slime's default is 0.1", hint=f"set --{key} 0")
    return Translation({})


def devices(key: str, value: Value, given: Given) -> Translation:
    note = f"{key}: all roles share these GPUs; slime gives the engines GPUs of their own"
    return Translation({"trainer.n_gpus_per_node": value}, "" if given["colocate"] else note)


def if_given(ours: str) -> Rule:
    return lambda _key, value, _given: Translation({} if value in (None, []) else {ours: value})


def _read_elsewhere(_key: str, _value: Value, _given: Given) -> Translation:
    return Translation({})


_DISTILLATION = "set distillation.teacher to a Hugging Face model"
RULES: dict[str, Rule] = {
    **{name: no_effect(reason) for name, reason in _FACTS["without_effect"].items()},
    **dict.fromkeys(_FACTS["read_with_others"], _read_elsewhere),
    "actor_num_nodes": to("trainer.nnodes"),
    "actor_num_gpus_per_node": devices,
    "rollout_num_gpus_per_engine": to("rollout.tensor_parallel"),
    "hf_checkpoint": to("model.path"),
    "ref_load": reference,
    "load": load,
    "save": directory,
    "save_interval": if_given("trainer.save_freq"),
    "prompt_data": prompts,
    "input_key": to("data.prompt_key"),
    "apply_chat_template": template,
    "apply_chat_template_kwargs": template_arguments,
    "multimodal_keys": refused("vision is not supported: use prompts of text"),
    "rollout_shuffle": to("data.shuffle"),
    "rollout_seed": to("trainer.seed"),
    "deterministic_mode": if_given("trainer.deterministic"),
    "num_rollout": batches_of_training,
    "rollout_batch_size": to("data.train_batch_size"),
    "n_samples_per_prompt": to("rollout.samples_per_prompt"),
    "global_batch_size": mini_batch,
    "rollout_max_prompt_len": prompt_length,
    "rollout_max_response_len": response_length,
    "rollout_temperature": to("rollout.temperature"),
    "rollout_top_p": to("rollout.top_p"),
    "rollout_top_k": lambda _key, value, _given: Translation({} if value in (-1, 0) else {"rollout.top_k": value}),
    "rollout_stop": if_given("rollout.stop"),
    "rollout_function_path": sampler,
    "custom_generate_function_path": refused("write an environment for rollout.environment.path"),
    "dynamic_sampling_filter_path": filtering,
    "rm_type": reward,
    "custom_rm_path": own_reward,
    "custom_config_path": refused("write its arguments into the command line"),
    "eval_interval": lambda _key, value, _given: Translation({"trainer.test_freq": -1 if value is None else value}),
    "eval_prompt_data": evaluation,
    "eval_max_response_len": evaluation_length,
    "eval_config": refused("name the files with --eval-prompt-data"),
    "skip_eval_before_train": lambda _key, value, _given: Translation({"trainer.test_before_training": not value}),
    "advantage_estimator": estimator,
    "eps_clip": to("actor.clip_ratio"),
    "eps_clip_high": clip_high,
    "eps_clip_c": dual_clip,
    "value_clip": only_with_critic("critic.clip_range_value"),
    "gamma": discount,
    "lambd": only_with_critic("algorithm.lam"),
    "num_critic_only_steps": only_with_critic("trainer.critic_warmup"),
    "kl_coef": kl_in_reward,
    "use_kl_loss": kl_loss,
    "entropy_coef": to("actor.entropy_coefficient"),
    "calculate_per_token_loss": aggregation,
    "use_tis": correction,
    "use_rollout_logprobs": mapped({"true": "engine", "false": "trainer"}, "algorithm.old_log_probs"),
    "use_opd": mapped({"false": "advantage"}, "distillation.signal"),
    "opd_teacher_load": refused(_DISTILLATION),
    "lr": of_trained("learning_rate"),
    "lr_decay_style": schedule,
    "optimizer": optimizer,
    "weight_decay": of_trained("weight_decay"),
    "clip_grad": of_trained("max_gradient_norm"),
    "attention_dropout": no_dropout,
    "hidden_dropout": no_dropout,
    "fp16": mapped({"true": "float16", "false": "bfloat16"}, "model.dtype"),
    "use_wandb": lambda _key, value, _given: Translation({"trainer.loggers": ["wandb"]} if value else {}),
    "wandb_project": if_given("trainer.project_name"),
}


def _starts(entry: str, arguments: Sequence[str]) -> str | None:
    return "train" if is_slime("train.py", entry, arguments) else None


def is_slime(file: str, entry: str, arguments: Sequence[str]) -> bool:
    """Whether a command runs this file of slime's: other projects have files of that name."""
    return PurePosixPath(entry).name == file and any(
        argument.startswith(("--hf-checkpoint", "--rollout-batch-size")) for argument in arguments
    )


ROW = Tool(name="slime", starts=_starts, defaults=lambda _command: DEFAULTS, rules=lambda _command: RULES)
