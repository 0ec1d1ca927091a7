"""Keys of verl's section `data`."""

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
    own_code,
    to,
    unsupported,
    word,
)
from trainer.compat.verl.sections.asynchronous import asynchronous


def truncation(key: str, value: Value, given: Given) -> Translation:
    if is_true(given.get("data.filter_overlong_prompts", False)):
        return Translation({})  # filtering removes every long prompt
    names = {"error": "error", "left": "truncate_left", "right": "truncate_right"}
    return mapped(names, "data.overlong_prompts")(key, value, given)


def filter_overlong(key: str, value: Value, given: Given) -> Translation:
    if is_true(value):
        return Translation({"data.overlong_prompts": "filter"})
    return only("false")(key, value, given)


def prompts_per_round(key: str, value: Value, given: Given) -> Translation:
    """Rounds exist with dynamic sampling only, and there every round draws a whole batch."""
    if word(value) in ("null", word(given.get("data.train_batch_size"))):
        return Translation({})
    if asynchronous(given):
        return no_effect("prompts are drawn for a whole step")(key, value, given)
    if is_true(given.get("algorithm.filter_groups.enable", given.get("algorithm.dynamic_sampling", False))):
        return no_effect("each round draws data.train_batch_size prompts")(key, value, given)
    raise unsupported(key, value, ("null", "the value of data.train_batch_size"))


def seed(_key: str, value: Value, _given: Given) -> Translation:
    """verl draws a seed if it is null; ours is fixed then."""
    return Translation({} if word(value) == "null" else {"trainer.seed": value})


def shared_memory(key: str, value: Value, given: Given) -> Translation:
    if is_true(value):
        return Translation({"data.cache_dir": "/dev/shm/slipway-data"})
    return only("false")(key, value, given)


def chat_template_kwargs(key: str, _value: Value, given: Given) -> Translation:
    """All keys below `data.apply_chat_template_kwargs` as one mapping."""
    section = key.rpartition(".")[0] + "."
    arguments = {name.removeprefix(section): value for name, value in given.items() if name.startswith(section)}
    return Translation({"data.chat_template_kwargs": arguments})


RULES: dict[str, Rule] = {
    "data.val_files": to("data.validation_files"),
    "data.truncation": truncation,
    "data.filter_overlong_prompts": filter_overlong,
    "data.filter_overlong_prompts_workers": no_effect("the tokenizer chooses its number of threads"),
    "data.apply_chat_template_kwargs": to("data.chat_template_kwargs"),
    "data.apply_chat_template_kwargs.*": chat_template_kwargs,
    "data.image_patch_size": no_effect("rows with images are refused when they are read"),
    "data.val_batch_size": no_effect("all held-out prompts are sampled in one batch"),
    "data.gen_batch_size": prompts_per_round,
    "data.seed": seed,
    "data.val_max_samples": to("data.validation_max_samples"),
    "data.use_shm": shared_memory,
    "data.tokenizer": only("null"),
    "data.reward_fn_key": only("data_source"),
    "data.dataloader_num_workers": no_effect("prompts are tokenised once, at the start"),
    "data.validation_shuffle": no_effect("the order of the held-out prompts does not matter"),
    **no_effects(
        "data",
        ("return_raw_input_ids", "return_raw_chat", "return_full_prompt", "return_multi_modal_inputs"),
        "prompts are sent as tokens",
    ),
    "data.sampler.class_path": only("null"),
    "data.sampler.class_name": only("null"),
    "data.datagen.path": only("null"),
    "data.datagen.name": only("null"),
    "data.trust_remote_code": own_code,
}
