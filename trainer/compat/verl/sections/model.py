"""Keys of verl's section `actor_rollout_ref.model`."""

import yaml

from trainer.compat.verl.rules import Given, Rule, Translation, Value, mapped, no_effect, only, own_code, to, word
from trainer.compat.verl.shared import KERNELS, MODEL, PACKED
from trainer.compat.verl.subsections.dtypes import model_type

# Names of dropout in configurations of Transformers. Nothing is dropped here.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout")


def lora_alpha(role: str, rank_key: str) -> Rule:
    """Without adapters verl ignores their scale."""

    def rule(_key: str, value: Value, given: Given) -> Translation:
        off = word(given.get(rank_key, given.get(f"{role}.lora.rank", 0))) in ("0", "null")
        return Translation({} if off else {f"{role}.lora.alpha": value})

    return rule


def excluded_modules(key: str, value: Value, _given: Given) -> Translation:
    """verl takes names, or one regular expression for whole paths; scripts exclude vision towers by the latter."""
    if isinstance(value, str) and "visual" in value:
        return Translation({}, f"{key} has no effect: language models have no visual layers", ignored=True)
    if word(value) in ("null", "[]"):
        return Translation({})
    return Translation({"actor.lora.exclude_modules": [value] if isinstance(value, str) else value})


def override_config(_key: str, _value: Value, given: Given) -> Translation:
    """Entries of the model's configuration. verl reads them in a section of their own as well, `model_config`."""
    section, entries = f"{MODEL}.override_config.", {}
    for key, value in given.items():
        name = key.removeprefix(section).removeprefix("model_config.")
        if key.startswith(section) and name not in (*_DROPOUTS, "attn_implementation", "model_config"):
            entries[name] = yaml.safe_load(value) if isinstance(value, str) else value
    return Translation({"model.override_config": entries})


def dropout_rules(section: str) -> dict[str, Rule]:
    return {f"{section}.{name}": only("0", "0.0", "0.") for name in _DROPOUTS}


RULES: dict[str, Rule] = {
    f"{MODEL}.path": to("model.path"),
    f"{MODEL}.enable_gradient_checkpointing": to("actor.activation_checkpointing"),
    f"{MODEL}.use_remove_padding": no_effect(PACKED),
    f"{MODEL}.use_fused_kernels": no_effect(KERNELS),
    f"{MODEL}.fused_kernel_options.impl_backend": no_effect(KERNELS),
    f"{MODEL}.use_liger": no_effect(KERNELS),
    f"{MODEL}.use_shm": no_effect("models are read from model.path directly"),
    f"{MODEL}.enable_activation_offload": no_effect(
        "activations stay on the device; see actor.activation_checkpointing"
    ),
    f"{MODEL}.torch_dtype": model_type,
    f"{MODEL}.lora_rank": to("actor.lora.rank"),
    f"{MODEL}.lora_alpha": lora_alpha("actor", f"{MODEL}.lora_rank"),
    f"{MODEL}.target_modules": to("actor.lora.target_modules"),
    f"{MODEL}.exclude_modules": excluded_modules,
    f"{MODEL}.lora_adapter_path": to("actor.lora.path"),
    f"{MODEL}.lora.merge": mapped({"true": "merged", "false": "adapters"}, "rollout.lora"),
    f"{MODEL}.trust_remote_code": own_code,
    f"{MODEL}.external_lib": only("null"),
    f"{MODEL}.custom_chat_template": to("data.chat_template"),
    f"{MODEL}.override_config": only("{}"),
    f"{MODEL}.override_config.max_position_embeddings": override_config,
    f"{MODEL}.override_config.model_config.max_position_embeddings": override_config,
    f"{MODEL}.override_config.attn_implementation": no_effect("log-probs are those of every implementation"),
    **dropout_rules(f"{MODEL}.override_config"),
}
