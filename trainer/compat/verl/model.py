"""Keys of verl's section `actor_rollout_ref.model`."""

from trainer.compat.verl.rules import Rule, no_effect, only, to
from trainer.compat.verl.shared import KERNELS, MODEL, PACKED

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
    f"{MODEL}.lora_rank": to("actor.lora.rank"),
    f"{MODEL}.lora_alpha": to("actor.lora.alpha"),
    f"{MODEL}.target_modules": to("actor.lora.target_modules"),
    f"{MODEL}.exclude_modules": only("null"),
    f"{MODEL}.lora_adapter_path": only("null"),
    f"{MODEL}.trust_remote_code": only("false"),
    f"{MODEL}.external_lib": only("null"),
    f"{MODEL}.custom_chat_template": only("null"),
    f"{MODEL}.override_config": only("{}"),
}
