"""Keys of verl's `sft_trainer`, and of the older `fsdp_sft_trainer`."""

import json
from pathlib import Path

from trainer.compat.verl.rules import (
    Given,
    Rule,
    Translation,
    Value,
    is_true,
    mapped,
    no_effect,
    no_effects,
    only,
    optional,
    refused,
    to,
    typed,
    unsupported,
    word,
)
from trainer.compat.verl.sections import data, model, trainer
from trainer.compat.verl.sections.optim import optimizer_rules
from trainer.compat.verl.shared import CHECKPOINT, CHECKPOINT_KEYS, MODEL, PACKED, PROFILER_KEYS, TRACES
from trainer.compat.verl.subsections.groups import TUNED_ROLE, split_tokens
from trainer.compat.verl.subsections.sharding import fsdp_rules
from trainer.compat.verl.translate import Dialect, default_only
from trainer.errors import ConfigError

_OLD_SCHEDULES = ("cosine", "wsd")
_OLD_LOSS = (
    "fsdp_sft_trainer: its loss is the mean over micro-batches of their means over tokens; here every learned token of "
    "a batch has the same weight, as in verl's sft_trainer"
)
_OLD_END = "; it ends responses with the tokenizer's end token, here the chat template ends them as any other turn"


def conversations(_key: str, value: Value, given: Given) -> Translation:
    """`data.multiturn.enable` of fsdp_sft_trainer: conversations, or the columns question and answer.

    Every line of that trainer has the key, so the notes about its loss and its responses stand here.
    """
    if is_true(value):
        return Translation({"sft.messages_key": given.get("data.multiturn.messages_key", "messages")}, _OLD_LOSS)
    return Translation(
        {}, _OLD_LOSS + _OLD_END, inherited={"data.prompt_key": "question", "sft.response_key": "answer"}
    )


def first_rows(ours: str) -> Rule:
    """verl takes the first rows of the files; here `data.shuffle` draws them."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        drawn = not word(value).startswith("-") and word(given.get("data.shuffle", True)) != "false"
        note = f"{key}={value}: drawn at random; verl takes the first rows, as data.shuffle=false does here"
        return Translation({ours: value}, note if drawn else "")

    return rule


def column(keys: str, ours: str) -> Rule:
    """A column of fsdp_sft_trainer, and below it the keys of mappings that verl lists under `keys`."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if is_true(given.get("data.multiturn.enable")):
            return no_effect("data.multiturn.enable=true reads conversations")(key, value, given)
        inner = given.get(keys)
        names = inner if isinstance(inner, list) else [] if word(inner) in ("null", "none") else [inner]
        return Translation({ours: ".".join(map(str, [value, *names]))})

    return rule


def keys_of(column_key: str, default: str, ours: str) -> Rule:
    """The list that belongs to a column, for a line that does not name the column."""

    def rule(key: str, _value: Value, given: Given) -> Translation:
        if column_key in given:
            return Translation({})  # the column's rule reads the list
        return column(key, ours)(column_key, default, given)

    return rule


def truncation(key: str, value: Value, given: Given) -> Translation:
    """Without padding, verl's sft_trainer cuts the right side whatever side it is told."""
    names = {"error": "error", "left": "truncate_left", "right": "truncate_right"}
    old = "data.multiturn.enable" in given
    if word(value) == "left" and not old and word(given.get("data.pad_mode", "no_padding")) == "no_padding":
        return Translation({"data.overlong_prompts": "truncate_right"}, f"{key}=left cuts the right side, as in verl")
    return mapped(names, "data.overlong_prompts")(key, value, given)


def template_arguments(_key: str, _value: Value, given: Given) -> Translation:
    """The arguments of the chat template, with verl's default for rows that say nothing of thinking."""
    section = "data.apply_chat_template_kwargs"
    whole = given.get(section)
    arguments = dict(whole) if isinstance(whole, dict) else {}
    arguments |= {
        name.removeprefix(f"{section}."): argument for name, argument in given.items() if name.startswith(f"{section}.")
    }
    thinking = typed(given.get("data.enable_thinking_default"))
    if word(thinking) not in ("null", "none"):
        arguments["enable_thinking"] = bool(thinking)
    return Translation({"data.chat_template_kwargs": arguments})


def tokens(key: str, value: Value, given: Given) -> Translation:
    if is_true(given.get("data.use_dynamic_bsz", True)):
        return Translation({"actor.micro_batch_tokens": value})
    return Translation({}, f"{key} has no effect: data.use_dynamic_bsz is not true", ignored=True)


def frequency(ours: str, rule: Rule) -> Rule:
    def counted(key: str, value: Value, given: Given) -> Translation:
        if word(value) == "after_each_epoch":
            raise ConfigError(
                f"{key}={value} is not supported here",
                hint=f"set {ours} to the rows of the files divided by data.train_batch_size",
            )
        return rule(key, value, given)

    return counted


def steps(_key: str, value: Value, given: Given) -> Translation:
    if word(value) in ("null", "none"):
        return Translation({})
    old = "data.multiturn.enable" in given
    note = (
        f"trainer.total_training_steps={value}: the learning rate falls over these steps; in fsdp_sft_trainer over "
        "those of trainer.total_epochs"
    )
    return Translation({"trainer.total_steps": value}, note if old else "")


def old_schedule(key: str, value: Value, _given: Given) -> Translation:
    if word(value) not in _OLD_SCHEDULES:
        raise unsupported(key, value, _OLD_SCHEDULES)
    return Translation({"actor.schedule.name": word(value)})


def checkpoints_to_keep(_key: str, value: Value, _given: Given) -> Translation:
    keeps_all = word(value) in ("null", "none") or word(value).startswith(("-", "0"))
    return Translation({"trainer.keep_checkpoints": None if keeps_all else value})


def engine(key: str, value: Value, _given: Given) -> Translation:
    if word(value) != "fsdp":
        raise ConfigError(
            f"{key}={value} is not supported here: fine-tuning reads verl's keys of its FSDP engine alone",
            hint=f"leave out {key} and its keys; for Megatron's layers set actor.backend=megatron and actor.sharding",
        )
    return Translation({})


def of_another_engine(key: str, value: Value, given: Given) -> Translation:
    """A key that verl's FSDP engine lacks. With another engine, which is refused, its keys need no further error."""
    if key in DIALECT.defaults:
        return default_only(DIALECT)(key, value, given)
    section = key.partition(".")[0]
    if word(given.get(section, "fsdp")) == "fsdp":
        raise ConfigError(f"{key}: there is no such setting", hint=f"verl's keys in {section} are those of FSDP")
    return Translation({})


def cpu_offload(_key: str, value: Value, _given: Given) -> Translation:
    on = is_true(value)
    return Translation({"actor.sharding.param_offload": on, "actor.sharding.optimizer_offload": on})


def mismatched(key: str, value: Value, _given: Given) -> Translation:
    note = f"{key}: a conversation has the tokens of its whole text; verl joins messages that it tokenised one by one"
    return Translation({}, note if is_true(value) else "")


_NOT_MODEL = tuple(f"{MODEL}.{key}" for key in ("override_config", "torch_dtype", "path", "lora_alpha", "lora.merge"))

RULES: dict[str, Rule] = {
    "data.val_files": optional("data.validation_files"),
    "data.val_max_samples": first_rows("data.validation_max_samples"),
    "data.messages_key": to("sft.messages_key"),
    "data.multiturn.enable": conversations,
    "data.multiturn.messages_key": lambda _key, _value, _given: Translation({}),  # read with data.multiturn.enable
    "data.multiturn.tools_key": only("tools"),
    "data.multiturn.enable_thinking_key": only("enable_thinking"),
    "data.tools_key": only("tools"),
    "data.enable_thinking_key": only("enable_thinking"),
    "data.enable_thinking_default": template_arguments,
    "data.apply_chat_template_kwargs": template_arguments,
    "data.apply_chat_template_kwargs.*": template_arguments,
    "data.response_key": column("data.response_dict_keys", "sft.response_key"),
    "data.prompt_dict_keys": keys_of("data.prompt_key", "question", "data.prompt_key"),
    "data.response_dict_keys": keys_of("data.response_key", "answer", "sft.response_key"),
    "data.max_length": to("sft.max_length"),
    "data.truncation": truncation,
    "data.micro_batch_size": no_effect("data.micro_batch_size_per_gpu counts"),
    "data.micro_batch_size_per_gpu": to("actor.micro_batch_size"),
    "data.use_dynamic_bsz": only("true", "false"),  # read with data.max_token_len_per_gpu
    "data.max_token_len_per_gpu": tokens,
    "data.pad_mode": no_effect(PACKED),
    "data.balance_dp_token": no_effect("every learned token of a batch has the same weight"),
    "data.custom_cls.path": refused("write the rows into data.train_files, with conversations in data.messages_key"),
    "data.custom_cls.name": refused("write the rows into data.train_files, with conversations in data.messages_key"),
    "data.use_shm": no_effect("rows are read and tokenised once, at the start"),
    "data.num_workers": no_effect("rows are read and tokenised once, at the start"),
    "data.ignore_input_ids_mismatch": mismatched,
    "data.trust_remote_code": data.RULES["data.trust_remote_code"],
    "data.chat_template": optional("data.chat_template"),
    "model": only("hf_model"),
    "model.partial_pretrain": to("model.path"),
    **{key.replace(MODEL, "model", 1): rule for key, rule in model.RULES.items() if not key.startswith(_NOT_MODEL)},
    "model.lora.merge": no_effect("nothing is sampled"),
    "model.lora_alpha": model.lora_alpha("actor", "model.lora_rank"),
    "model.strategy": mapped({"fsdp": "fsdp", "fsdp2": "fsdp"}, "actor.backend"),
    **fsdp_rules("model.fsdp_config", TUNED_ROLE),
    "model.fsdp_config.cpu_offload": cpu_offload,
    "model.fsdp_config.offload_params": no_effect("model.fsdp_config.cpu_offload moves the weights"),
    "engine": engine,
    "engine.*": of_another_engine,
    **fsdp_rules("engine", TUNED_ROLE),
    "engine.strategy": mapped({"fsdp": "fsdp", "fsdp2": "fsdp"}, "actor.backend"),
    "optim": engine,
    "optim.*": of_another_engine,
    **{key: rule for key, rule in optimizer_rules("optim", TUNED_ROLE).items() if key != "optim.grad_clip"},
    "optim.lr_scheduler": old_schedule,
    "ulysses_sequence_parallel_size": split_tokens(TUNED_ROLE),
    "use_remove_padding": no_effect(PACKED),
    **no_effects("checkpoint", CHECKPOINT_KEYS, CHECKPOINT),
    **no_effects("trainer.checkpoint", CHECKPOINT_KEYS, CHECKPOINT),
    **{key: rule for key, rule in trainer.RULES.items() if key.startswith(("trainer.", "hydra."))},
    **trainer.resume_rules("auto", "resume_path"),
    "trainer.total_training_steps": steps,
    "trainer.max_ckpt_to_keep": checkpoints_to_keep,
    "trainer.profile_interval": no_effect(TRACES),
    "profiler.enable": no_effect(TRACES),
    **no_effects("profiler", PROFILER_KEYS, TRACES),
}

SAME_NAMES: dict[str, Rule] = {
    "data.train_max_samples": first_rows("data.train_max_samples"),
    "data.prompt_key": column("data.prompt_dict_keys", "data.prompt_key"),
    "data.custom_cls.path": RULES["data.custom_cls.path"],
    "data.custom_cls.name": RULES["data.custom_cls.name"],
    "trainer.save_freq": frequency("trainer.save_freq", trainer.save_freq),
    "trainer.test_freq": frequency("trainer.test_freq", to("trainer.test_freq")),
}

DIALECT = Dialect(
    RULES, json.loads(Path(__file__).with_name("sft_defaults.json").read_text(encoding="utf-8")), SAME_NAMES
)
