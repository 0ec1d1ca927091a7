"""Keys of verl's section `algorithm`."""

from trainer.algorithms.registry import ESTIMATORS
from trainer.compat.verl.rules import (
    KL_KINDS,
    Given,
    Rule,
    Translation,
    Value,
    is_true,
    mapped,
    number,
    only,
    samples_per_prompt,
    switch,
    switched_by,
    to,
    unsupported,
    whole,
    word,
)
from trainer.compat.verl.sections import reward
from trainer.compat.verl.subsections import rollout_correction
from trainer.errors import ConfigError

_ESTIMATORS = {name: name for name in ESTIMATORS} | {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
_CORRECTIONS = {"token": "tis", "true": "tis", "sequence": "sequence_tis"}
_METRIC = "algorithm.filter_groups.metric"
_METRICS = ("acc", "score", "reward", "seq_reward", "seq_final_reward", "null", "none")


def estimator(key: str, value: Value, given: Given) -> Translation:
    if word(value) == "rloo_vectorized" and samples_per_prompt(given, default=2) == 1:
        raise ConfigError(
            f"{key}=rloo_vectorized gives a single response the advantage 0, so nothing would be learned",
            hint="set actor_rollout_ref.rollout.n to 2 or more, or algorithm.adv_estimator=rloo for the plain score",
        )
    return mapped(_ESTIMATORS, "algorithm.advantage")(key, value, given)


def filter_groups(key: str, value: Value, given: Given) -> Translation:
    if is_true(value) and _METRIC not in given:
        _check_metric("reward", given)  # verl's default
    return to("algorithm.dynamic_sampling")(key, value, given)


def filter_metric(key: str, value: Value, given: Given) -> Translation:
    if not is_true(given.get("algorithm.filter_groups.enable", given.get("algorithm.dynamic_sampling"))):
        return Translation({}, f"{key} has no effect: algorithm.filter_groups.enable is not true", ignored=True)
    _check_metric(word(value), given)
    return Translation({})


def _check_metric(metric: str, given: Given) -> None:
    """Refuses a metric that may tell responses apart whose scores are equal, or the other way round."""
    if metric not in _METRICS:
        raise unsupported(_METRIC, metric, _METRICS)
    compared = "groups are compared by the score of"
    reason = ""
    if metric in ("acc", "score") and reward.model_scores(given):
        reason = f"{compared} the reward model alone"
    elif metric == "acc" and reward.has_function(given):
        reason = f"{compared} the reward function, and its acc may differ from its score"
    elif metric in ("reward", "seq_reward", "seq_final_reward") and reward.penalises_length(given):
        reason = f"{compared} a response without the penalty on long responses"
    elif metric == "seq_final_reward" and _kl_in_reward(given):
        reason = f"{compared} a response without the KL"
    if reason:
        other = "reward" if reward.model_scores(given) else "score"
        raise ConfigError(f"{_METRIC}={metric}: {reason}", hint=f"set {_METRIC}={other} to compare groups by that")


def kl_control(key: str, value: Value, given: Given) -> Translation:
    if _kl_in_reward(given):
        return mapped({"fixed": "fixed", "adaptive": "adaptive"}, "algorithm.kl_control")(key, value, given)
    return Translation({}, f"{key} has no effect: algorithm.use_kl_in_reward is not true", ignored=True)


def _kl_in_reward(given: Given) -> bool:
    if "algorithm.kl_coefficient" in given:
        return number(given["algorithm.kl_coefficient"]) != 0
    return is_true(given.get("algorithm.use_kl_in_reward", True))


def sampling_rounds(key: str, value: Value, given: Given) -> Translation:
    """verl counts batches of `data.gen_batch_size` prompts, and has no limit for 0."""
    batches, sizes = whole(value), [whole(given.get(f"data.{name}_batch_size")) for name in ("gen", "train")]
    if batches is None:
        raise ConfigError(f"{key}={value}: expected a whole number", hint="0 means no limit")
    drawn, trained = (size or 1 for size in sizes) if None not in sizes else (1, 1)
    return Translation({"algorithm.max_sampling_rounds": -(-batches * drawn // trained) if batches > 0 else None})


def components(ours: str) -> Rule:
    """A setting of GDPO, which verl ignores with other estimators."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if word(given.get("algorithm.adv_estimator", given.get("algorithm.advantage"))) != "gdpo":
            return Translation({}, f"{key} has no effect: algorithm.adv_estimator is not gdpo", ignored=True)
        return Translation({} if word(value) == "null" else {ours: value})

    return rule


def resampling(key: str, value: Value, given: Given) -> Translation:
    """PF-PPO, which verl applies to the responses of GAE only."""
    if not is_true(value):
        return only("false")(key, value, given)
    chosen = word(given.get("algorithm.adv_estimator", given.get("algorithm.advantage", "gae")))
    if chosen != "gae":
        return Translation({}, f"{key} has no effect: verl resamples only with algorithm.adv_estimator=gae")
    methods = {"pow": "power", "max_min": "max_min", "max_random": "max_random"}
    method = given.get("algorithm.pf_ppo.reweight_method", "pow")
    native = mapped(methods, "algorithm.resampling")("algorithm.pf_ppo.reweight_method", method, given).settings
    if native["algorithm.resampling"] == "power":
        native["algorithm.resampling_power"] = given.get("algorithm.pf_ppo.weight_pow", 2.0)
    return Translation(native)


def of_resampling(key: str, _value: Value, given: Given) -> Translation:
    """Read with `use_pf_ppo`."""
    if is_true(given.get("algorithm.use_pf_ppo", False)):
        return Translation({})
    return Translation({}, f"{key} has no effect: algorithm.use_pf_ppo is not true", ignored=True)


def rollout_is(key: str, value: Value, given: Given) -> Translation:
    if word(value) in ("null", "none", "false"):
        return Translation({})
    return mapped(_CORRECTIONS, "algorithm.correction")(key, value, given)


RULES: dict[str, Rule] = {
    "algorithm.adv_estimator": estimator,
    "algorithm.norm_adv_by_std_in_grpo": to("algorithm.divide_by_std"),
    "algorithm.use_kl_in_reward": switch("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coefficient", 0.001),
    "algorithm.kl_penalty": mapped(KL_KINDS, "algorithm.kl_estimator"),
    "algorithm.kl_ctrl.type": kl_control,
    "algorithm.kl_ctrl.kl_coef": switched_by("algorithm.use_kl_in_reward", "algorithm.kl_coefficient"),
    "algorithm.kl_ctrl.horizon": to("algorithm.kl_horizon"),
    "algorithm.kl_ctrl.target_kl": to("algorithm.kl_target"),
    "algorithm.filter_groups.enable": filter_groups,
    "algorithm.filter_groups.max_num_gen_batches": sampling_rounds,
    _METRIC: filter_metric,
    "algorithm.rollout_is": rollout_is,
    "algorithm.rollout_is_threshold": to("algorithm.correction_high"),
    **rollout_correction.RULES,
    "algorithm.gdpo_reward_keys": components("algorithm.reward_components"),
    "algorithm.gdpo_reward_weights": components("algorithm.component_weights"),
    "algorithm.use_pf_ppo": resampling,
    "algorithm.pf_ppo.reweight_method": of_resampling,
    "algorithm.pf_ppo.weight_pow": of_resampling,
}
