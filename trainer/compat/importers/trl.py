"""TRL's commands `trl grpo`, `trl dpo` and `trl kto` with their YAML files, as of its version 1.16."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.compat.command_lines import Tool
from trainer.compat.verl.rules import Given, Rule, Translation, Value, mapped, no_effect, to, unsupported, word
from trainer.errors import ConfigError

COMMANDS = ("grpo", "dpo", "kto")
NO_DUAL_CLIP = 1e9  # larger than any ratio
_FACTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_DEFAULTS: dict[str, dict[str, Value]] = _FACTS["defaults"]
_LONGEST_PROMPT = 1024  # where TRL has no limit
_PAIR_LOSSES = (
    "sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "nca_pair", "sppo_hard", "apo_zero", "apo_down",
)  # fmt: skip


def starts(entry: str, arguments: Sequence[str]) -> str | None:
    """Our command for `trl COMMAND …`. Raises ConfigError for a command of TRL that has no counterpart."""
    if entry != "trl" or not arguments:
        return None
    command = arguments[0]
    if command not in COMMANDS:
        raise ConfigError(f"trl {command} has no counterpart here", hint=f"supported: trl {', '.join(COMMANDS)}")
    return "train" if command == "grpo" else command


def prepared(arguments: Sequence[str]) -> list[str]:
    """The arguments after those of `--config FILE`, which they override."""
    words = list(arguments[1:])
    if "--config" not in words[:-1]:
        return words
    at = words.index("--config")
    file = Path(words[at + 1])
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file}: cannot be read: {error}", hint="name a YAML file") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: not a mapping of arguments", hint="name a YAML file of TRL")
    return [*(word for name, value in content.items() for word in _words(name, value)), *words[:at], *words[at + 2 :]]


def _words(name: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [f"--{name}", *(word(one) if isinstance(one, bool) or one is None else str(one) for one in values)]


def defaults(command: str) -> Mapping[str, Value]:
    return {**_DEFAULTS["common"], **_DEFAULTS["grpo" if command == "train" else command]}


def processes(given: Given) -> int:
    """How many processes share a batch. Raises ConfigError if the command line does not say."""
    count = given["num_processes"]
    if not isinstance(count, int):
        raise ConfigError(
            "--num_processes is not given: the batch size depends on the number of GPUs",
            hint="add --num_processes with the number that the script was written for",
        )
    return count


def optimizer_batch(given: Given) -> int:
    """Examples per optimizer step, over all processes."""
    each, accumulated = given["per_device_train_batch_size"], given["gradient_accumulation_steps"]
    assert isinstance(each, int)
    assert isinstance(accumulated, int)
    return processes(given) * each * accumulated


def grpo_batch(_key: str, _value: Value, given: Given) -> Translation:
    """TRL counts responses per process; several optimizer steps may share a generation."""
    step, group, steps = optimizer_batch(given), given["num_generations"], given["steps_per_generation"]
    accumulated, whole = given["gradient_accumulation_steps"], given["generation_batch_size"]
    assert isinstance(accumulated, int)
    generated = (
        whole if isinstance(whole, int) else step // accumulated * (steps if isinstance(steps, int) else accumulated)
    )
    if not isinstance(group, int) or generated % group or generated % step:
        raise ConfigError(
            f"{generated} responses per generation are no multiple of --num_generations {group} and of the {step} of "
            "an optimizer step",
            hint="change --generation_batch_size or --gradient_accumulation_steps",
        )
    return Translation(
        {
            "algorithm.advantage": "grpo",
            "rollout.samples_per_prompt": group,
            "data.train_batch_size": generated // group,
            "actor.mini_batch_size": step,
        }
    )


def batch(_key: str, _value: Value, given: Given) -> Translation:
    return Translation({"data.train_batch_size": optimizer_batch(given)})


def grpo_loss(key: str, value: Value, given: Given) -> Translation:
    kind = word(value)
    aggregations = {"dapo": "token-mean", "bnpo": "token-mean", "grpo": "seq-mean-token-mean"}
    found: dict[str, Value]
    if kind == "dr_grpo":
        longest = given["max_completion_length"]
        found = {"actor.loss_aggregation": "seq-mean-token-sum-norm", "actor.loss_scale_length": longest}
    elif kind in aggregations:
        found = {"actor.loss_aggregation": aggregations[kind]}
    else:
        raise unsupported(f"--{key}", value, (*aggregations, "dr_grpo"))
    level = word(given["importance_sampling_level"])
    if level not in ("token", "sequence"):
        raise unsupported("--importance_sampling_level", level, ("token", "sequence"))
    if level == "sequence":
        found["actor.policy_loss"] = "gspo"
    else:
        found |= {"actor.policy_loss": "ppo", "actor.clip_dual": NO_DUAL_CLIP}
    note = f"{key} bnpo: the mean is over all tokens of an optimizer step; TRL's is over those of a process"
    return Translation(found, note if kind == "bnpo" else "")


def engine_correction(_key: str, value: Value, given: Given) -> Translation:
    """TRL corrects for the engine only with vLLM."""
    if not given["use_vllm"] or not value:
        return Translation({"algorithm.correction": "none"})
    kinds = {
        "token_truncate": "tis",
        "token_mask": "icepop",
        "sequence_truncate": "sequence_tis",
        "sequence_mask": "sequence_icepop",
    }
    mode, low = word(given["vllm_importance_sampling_mode"]), given["vllm_importance_sampling_clip_min"]
    if mode not in kinds:
        raise unsupported("--vllm_importance_sampling_mode", mode, kinds)
    found: dict[str, Value] = {
        "algorithm.correction": kinds[mode],
        "algorithm.correction_high": given["vllm_importance_sampling_clip_max"],
    }
    if mode.endswith("mask"):
        found["algorithm.correction_low"] = 1e-9 if low is None else low
    elif low is not None:
        raise unsupported("--vllm_importance_sampling_clip_min", low, ("null",))
    return Translation(found)


def scale_rewards(key: str, value: Value, _given: Given) -> Translation:
    return mapped({"group": "true", "true": "true", "none": "false", "false": "false"}, "algorithm.divide_by_std")(
        f"--{key}", value, {}
    )


def reward_functions(key: str, value: Value, _given: Given) -> Translation:
    names = value if isinstance(value, list) else [value]
    if names == ["accuracy_reward"]:
        return Translation(
            {"reward.name": "math"}, f"{key} accuracy_reward: math scores by the same kind of comparison"
        )
    if not names:
        return Translation({})
    raise ConfigError(
        f"--{key} {' '.join(map(str, names))}: TRL calls rewards with other arguments",
        hint="write compute_score(data_source, solution_str, ground_truth, extra_info) for reward.custom_function.path",
    )


def reward_model(_key: str, value: Value, _given: Given) -> Translation:
    if value is None:
        return Translation({})
    return Translation({"reward.model.path": value, "reward.weight": 0.0})


def kl(_key: str, value: Value, _given: Given) -> Translation:
    return Translation({"actor.kl_loss_coefficient": value, "algorithm.kl_coefficient": 0.0})


def epsilon_high(_key: str, value: Value, given: Given) -> Translation:
    if value is None:
        return Translation({})
    return Translation({"actor.clip_ratio_low": given["epsilon"], "actor.clip_ratio_high": value})


def if_given(ours: str) -> Rule:
    return lambda _key, value, _given: Translation({} if value is None else {ours: value})


def positive(ours: str) -> Rule:
    return lambda _key, value, _given: Translation({ours: value} if isinstance(value, int) and value > 0 else {})


def top_k(_key: str, value: Value, _given: Given) -> Translation:
    return Translation({"rollout.top_k": value} if value else {})


def response_length(key: str, value: Value, _given: Given) -> Translation:
    note = f"{key}: TRL has no limit of prompts; longer ones than data.max_prompt_length are refused"
    return Translation({"data.max_response_length": value, "data.max_prompt_length": _LONGEST_PROMPT}, note)


def total_length(key: str, value: Value, _given: Given) -> Translation:
    """TRL cuts prompt and response together."""
    if not isinstance(value, int):
        raise ConfigError(f"--{key} {value}: this trainer needs a limit", hint=f"set --{key}")
    note = f"{key}: TRL cuts longer rows; rows with a longer prompt or response than half of it are refused"
    return Translation({"data.max_prompt_length": value // 2, "data.max_response_length": value - value // 2}, note)


def data(key: str, value: Value, given: Given) -> Translation:
    if value is None:
        raise ConfigError(f"--{key} is not given", hint="name the training data")
    columns = "prompt, chosen and rejected" if "label_smoothing" in given else "prompt, completion and label"
    if "num_generations" in given:
        columns = "prompt, reward_model.ground_truth and data_source"
    note = f"{key}: name a file with the columns {columns}, and a held-out one as data.validation_files"
    return Translation({"data.train_files": [value]}, note)


def optimizer(key: str, value: Value, given: Given) -> Translation:
    names = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd", "rmsprop": "rmsprop"}
    chosen = mapped(names, "actor.optimizer.name")(f"--{key}", value, given).settings
    if chosen["actor.optimizer.name"] == "adamw":
        chosen["actor.optimizer.betas"] = [given["adam_beta1"], given["adam_beta2"]]
        chosen["actor.optimizer.epsilon"] = given["adam_epsilon"]
    return Translation(chosen)


def warmup(_key: str, value: Value, _given: Given) -> Translation:
    """Below 1 it is a share of the steps."""
    share = isinstance(value, float) and value < 1
    return Translation({f"actor.schedule.{'warmup_ratio' if share else 'warmup_steps'}": value} if value else {})


def epochs(key: str, value: Value, _given: Given) -> Translation:
    if not isinstance(value, int | float) or value != int(value):
        raise ConfigError(f"--{key} {value}: only whole epochs are supported here", hint="set --max_steps")
    return Translation({"trainer.total_epochs": int(value)})


def precision(_key: str, _value: Value, given: Given) -> Translation:
    """TRL computes in bfloat16 unless it is told otherwise."""
    if given["fp16"]:
        return Translation({"model.dtype": "float16"})
    return Translation({"model.dtype": "float32" if given["bf16"] is False else "bfloat16"})


def weights(key: str, value: Value, given: Given) -> Translation:
    names = {"float32": "float32", "bfloat16": "bfloat16"}
    return mapped(names, "actor.weights_dtype")(f"--{key}", value, given)


def adapters(_key: str, value: Value, given: Given) -> Translation:
    if not value:
        return Translation({})
    if given["lora_dropout"] not in (0, _DEFAULTS["common"]["lora_dropout"]):
        raise unsupported("--lora_dropout", given["lora_dropout"], ("0.0",))
    note = "lora_dropout: adapters have no dropout here" if given["lora_dropout"] else ""
    own = {"rank": given["lora_r"], "alpha": given["lora_alpha"], "target_modules": given["lora_target_modules"]}
    return Translation({f"actor.lora.{name}": one for name, one in own.items()}, note)


def pair_loss(key: str, value: Value, given: Given) -> Translation:
    names = value if isinstance(value, list) else [value]
    if len(names) != 1 or names[0] not in _PAIR_LOSSES:
        raise ConfigError(
            f"--{key} {' '.join(map(str, names))} is not supported here", hint=f"one of {', '.join(_PAIR_LOSSES)}"
        )
    smoothing = {"dpo.label_smoothing": given["label_smoothing"]} if names[0] in ("sigmoid", "robust") else {}
    return Translation({"dpo.loss": names[0], **smoothing})


def order(key: str, value: Value, given: Given) -> Translation:
    return mapped({"sequential": "false", "random": "true"}, "data.shuffle")(f"--{key}", value, given)


def read_elsewhere(_key: str, _value: Value, _given: Given) -> Translation:
    """Another argument's rule reads it."""
    return Translation({})


_READ_ELSEWHERE = (
    "num_processes",
    "gradient_accumulation_steps",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "fp16",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "label_smoothing",
    "generation_batch_size",
    "steps_per_generation",
    "num_generations",
    "importance_sampling_level",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
)
_COMMON: dict[str, Rule] = {
    **{name: no_effect(reason) for name, reason in _FACTS["without_effect"].items()},
    **dict.fromkeys(_READ_ELSEWHERE, read_elsewhere),
    "model_name_or_path": to("model.path"),
    "dataset_name": data,
    "output_dir": if_given("trainer.output_dir"),
    "run_name": if_given("trainer.run_id"),
    "report_to": mapped({"none": "", "wandb": "wandb", "mlflow": "mlflow", "tensorboard": ""}, "trainer.loggers"),
    "num_train_epochs": epochs,
    "max_steps": positive("trainer.total_steps"),
    "learning_rate": to("actor.learning_rate"),
    "lr_scheduler_type": mapped(
        {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"},
        "actor.schedule.name",
    ),
    "warmup_steps": warmup,
    "optim": optimizer,
    "weight_decay": to("actor.weight_decay"),
    "max_grad_norm": to("actor.max_gradient_norm"),
    "gradient_checkpointing": to("actor.activation_checkpointing"),
    "bf16": precision,
    "dtype": weights,
    "seed": to("trainer.seed"),
    "full_determinism": to("trainer.deterministic"),
    "save_steps": to("trainer.save_freq"),
    "save_total_limit": if_given("trainer.keep_checkpoints"),
    "eval_strategy": mapped({"no": "-1", "steps": "5"}, "trainer.test_freq"),
    "eval_steps": positive("trainer.test_freq"),
    "use_peft": adapters,
}
_OWN: dict[str, dict[str, Rule]] = {
    "train": {
        "per_device_train_batch_size": grpo_batch,
        "max_completion_length": response_length,
        "temperature": to("rollout.temperature"),
        "top_p": to("rollout.top_p"),
        "top_k": top_k,
        "min_p": if_given("rollout.min_p"),
        "chat_template_kwargs": if_given("data.chat_template_kwargs"),
        "vllm_tensor_parallel_size": to("rollout.tensor_parallel"),
        "beta": kl,
        "num_iterations": to("actor.ppo_epochs"),
        "epsilon": to("actor.clip_ratio"),
        "epsilon_high": epsilon_high,
        "loss_type": grpo_loss,
        "scale_rewards": scale_rewards,
        "mask_truncated_completions": to("algorithm.mask_truncated"),
        "shuffle_dataset": to("data.shuffle"),
        "entropy_coef": to("actor.entropy_coefficient"),
        "reward_funcs": reward_functions,
        "reward_model_name_or_path": reward_model,
        "vllm_importance_sampling_correction": engine_correction,
        "use_bias_correction_kl": to("actor.kl_loss_unbiased"),
    },
    "dpo": {
        "per_device_train_batch_size": batch,
        "max_length": total_length,
        "loss_type": pair_loss,
        "beta": to("dpo.beta"),
    },
    "kto": {
        "per_device_train_batch_size": batch,
        "max_length": total_length,
        "train_sampling_strategy": order,
        "loss_type": to("kto.loss"),
        "beta": to("kto.beta"),
        "desirable_weight": to("kto.desirable_weight"),
        "undesirable_weight": to("kto.undesirable_weight"),
    },
}


def rules(command: str) -> Mapping[str, Rule]:
    return {**_COMMON, **_OWN[command]}


ROW = Tool(name="TRL", starts=starts, defaults=defaults, rules=rules, prepared=prepared)
