"""Keys of the loss in verl's section `actor_rollout_ref.actor`."""

from collections.abc import Sequence
from dataclasses import replace

from trainer.algorithms.registry import POLICY_LOSSES
from trainer.compat.verl.rules import (
    KL_KINDS,
    Given,
    Rule,
    Translation,
    Value,
    is_true,
    mapped,
    no_effect,
    number,
    switched_by,
    to,
    unsupported,
    word,
)
from trainer.compat.verl.sections.distillation import unless_teacher_alone
from trainer.compat.verl.shared import ACTOR, AGGREGATIONS
from trainer.compat.verl.subsections.rollout_correction import bypass_loss
from trainer.errors import ConfigError

LOSSES = {name: name for name in POLICY_LOSSES} | {"vanilla": "ppo", "geo_mean": "gmpo"}
_LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
_CLIP_BOUNDS = ("clip_ratio_low", "clip_ratio_high")
_CLIP_DEFAULT = 0.2
_BY_RESPONSE, _NORMED = "seq-mean-token-mean", "seq-mean-token-sum-norm"
_AGGREGATION, _SCALE = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"


def chosen_loss(given: Given) -> str:
    """The name of the policy loss in all settings given; `ppo` if none names it."""
    bypass = bypass_loss(given)
    if bypass is not None:
        return bypass
    latest = next((key for key in reversed(list(given)) if key in (_LOSS_MODE, "actor.policy_loss")), None)
    name = word(given[latest]) if latest else "ppo"
    return name if latest == "actor.policy_loss" else LOSSES.get(name, name)


def policy_loss(key: str, value: Value, given: Given) -> Translation:
    if bypass_loss(given) is not None:
        return Translation({}, f"{key} has no effect: in bypass mode, rollout_correction.loss_type names the loss")
    if word(value) == "dro" and word(given.get(f"{ACTOR}.policy_loss.dro_beta")) == "null":
        raise ConfigError(f"{key}=dro needs a weight", hint=f"set {ACTOR}.policy_loss.dro_beta to a positive number")
    translation = mapped(LOSSES, "actor.policy_loss")(key, value, given)
    mode = aggregation_of("actor", given)
    if chosen_loss(given) == "gspo" and mode != _BY_RESPONSE:
        note = (
            f"{key}={value}: losses are aggregated by {mode}, as in verl 0.9; earlier versions averaged over each "
            f"response, as {_AGGREGATION}={_BY_RESPONSE} does"
        )
        return replace(translation, note=note)
    if chosen_loss(given) == "gmpo":
        note = f"{key}={value}: the loss is the mean over responses; verl 0.9 adds up the means of micro-batches"
        return replace(translation, note=note)
    return translation


def aggregation_of(role: str, given: Given) -> str:
    """The aggregation of a role's losses in all settings given. verl's critic takes it from the actor."""
    keys = (f"{ACTOR if role == 'actor' else role}.loss_agg_mode", f"{role}.loss_aggregation")
    latest = next((key for key in reversed(list(given)) if key in keys), None)
    if latest is None:
        return aggregation_of("actor", given) if role == "critic" else "token-mean"
    return word(given[latest])


def aggregation(key: str, value: Value, given: Given) -> Translation:
    """The aggregation of all terms."""
    translation = mapped(AGGREGATIONS, "actor.loss_aggregation", inherited=("critic.loss_aggregation",))(
        key, value, given
    )
    if word(value) != _NORMED or word(given.get(_SCALE)) != "null":
        return translation
    note = (
        f"{key}={value}: losses are divided by data.max_response_length; verl 0.9 divides by the longest response of "
        f"each micro-batch unless {_SCALE} is set"
    )
    return replace(translation, note=note)


def scale_length(key: str, value: Value, given: Given) -> Translation:
    """verl reads it with one aggregation alone. Its critic takes it from the actor."""
    section, others = ("critic", ()) if key.startswith("critic.") else ("actor", ("critic",))
    if word(value) == "null":
        return Translation({})
    inherited = {f"{role}.loss_scale_length": value for role in others if aggregation_of(role, given) == _NORMED}
    if aggregation_of(section, given) != _NORMED:
        note = f"{key} has no effect: losses are aggregated by {aggregation_of(section, given)}, not {_NORMED}"
        return Translation({}, note, inherited=inherited)
    return Translation({f"{section}.loss_scale_length": value}, inherited=inherited)


def parameter(ours: str) -> Rule:
    """A parameter of some losses: verl ignores it with the others."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        loss = chosen_loss(given)
        if loss in POLICY_LOSSES and ours not in POLICY_LOSSES[loss].parameters:
            return Translation({}, f"{key} has no effect: the policy loss {loss} does not use it", ignored=True)
        return Translation({} if word(value) == "null" else {f"actor.{ours}": value})

    return rule


def clip_ratio(key: str, value: Value, given: Given) -> Translation:
    """verl reads it only for a bound that is null, and its bounds are 0.2 by default."""
    fixed = [bound for bound in _CLIP_BOUNDS if f"{ACTOR}.{bound}" not in given and f"actor.{bound}" not in given]
    translation = parameter("clip_ratio")(key, value, given)
    if translation.settings and fixed and number(value) != _CLIP_DEFAULT:
        raise ConfigError(
            f"{key}={value} has no effect in verl, whose {' and '.join(fixed)} are {_CLIP_DEFAULT} unless they are set",
            hint="set " + " and ".join(f"{ACTOR}.{bound}" for bound in _CLIP_BOUNDS),
        )
    return translation


def use_kl_loss(key: str, value: Value, given: Given) -> Translation:
    if word(value) not in ("true", "false", ""):
        raise unsupported(key, value, ("true", "false"))
    if not is_true(value):
        note = f"{key} is empty, which counts as false" if value == "" else ""
        return Translation({"actor.kl_loss_coefficient": 0.0}, note)
    coefficient = given.get(f"{ACTOR}.kl_loss_coef", 0.001)
    # Without kl_loss_type, verl differentiates k3.
    return Translation({"actor.kl_loss_coefficient": coefficient}, inherited={"actor.kl_loss_unbiased": False})


def kl_loss_type(key: str, value: Value, _given: Given) -> Translation:
    """A trailing + asks for the gradient of the KL, with any estimator."""
    name = word(value).removesuffix("+")
    if name not in KL_KINDS:
        raise unsupported(key, value, [*KL_KINDS, *(f"{kind}+" for kind in KL_KINDS)])
    unbiased = word(value).endswith("+")
    return Translation({"actor.kl_loss_estimator": KL_KINDS[name], "actor.kl_loss_unbiased": unbiased})


def parameters(names: dict[str, str], sections: Sequence[str]) -> dict[str, Rule]:
    return {f"{section}.{theirs}": parameter(ours) for section in sections for theirs, ours in names.items()}


RULES: dict[str, Rule] = {
    _LOSS_MODE: policy_loss,
    f"{ACTOR}.clip_ratio": clip_ratio,
    **parameters({bound: bound for bound in _CLIP_BOUNDS} | {"clip_ratio_c": "clip_dual"}, [ACTOR]),
    **parameters({"tau_pos": "tau_positive", "tau_neg": "tau_negative"}, [ACTOR, f"{ACTOR}.policy_loss"]),
    **parameters(
        {
            "clip_cov_ratio": "clip_cov_ratio",
            "clip_cov_lb": "clip_cov_low",
            "clip_cov_ub": "clip_cov_high",
            "kl_cov_ratio": "kl_cov_ratio",
            "ppo_kl_coef": "kl_cov_coefficient",
            "dro_beta": "dro_beta",
        },
        [f"{ACTOR}.policy_loss"],
    ),
    _AGGREGATION: aggregation,
    _SCALE: scale_length,
    "critic.loss_scale_factor": scale_length,
    f"{ACTOR}.entropy_coeff": unless_teacher_alone(to("actor.entropy_coefficient")),
    f"{ACTOR}.calculate_entropy": no_effect("the entropy is always computed"),
    f"{ACTOR}.use_kl_loss": unless_teacher_alone(use_kl_loss),
    f"{ACTOR}.kl_loss_coef": unless_teacher_alone(switched_by(f"{ACTOR}.use_kl_loss", "actor.kl_loss_coefficient")),
    f"{ACTOR}.kl_loss_type": kl_loss_type,
}
