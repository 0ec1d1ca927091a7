"""Keys of verl's sections `optim`, which actor and critic have."""

from trainer.compat.verl.rules import Rule, no_effects, to
from trainer.compat.verl.shared import ACTOR

_KEYS = (
    *("betas", "clip_grad", "lr_decay_steps", "lr_decay_style", "lr_scheduler_type", "lr_warmup_init"),
    *("lr_warmup_steps", "lr_warmup_steps_ratio", "lr_wsd_decay_steps", "lr_wsd_decay_style", "min_lr"),
    *("min_lr_ratio", "num_cycles", "optimizer", "optimizer_impl", "override_optimizer_config"),
    *("override_optimizer_config.*", "total_training_steps", "use_checkpoint_opt_param_scheduler"),
    *("warmup_style", "weight_decay_incr_style", "zero_indexed_step"),
)


def optimizer_rules(theirs: str, role: str) -> dict[str, Rule]:
    """The keys of one of verl's optimizer sections."""
    return {
        **no_effects(theirs, _KEYS, "the optimizer is AdamW with a constant learning rate"),
        f"{theirs}.lr": to(f"{role}.learning_rate"),
        f"{theirs}.weight_decay": to(f"{role}.weight_decay"),
    }


RULES = {**optimizer_rules(f"{ACTOR}.optim", "actor"), **optimizer_rules("critic.optim", "critic")}
