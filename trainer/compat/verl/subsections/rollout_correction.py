"""Keys of verl's section `algorithm.rollout_correction`. verl reads them together, and so do these rules."""

from typing import get_args

from trainer.algorithms.off_policy.rejection import Criterion
from trainer.compat.verl.rules import Given, Rule, Translation, Value, is_true, only, unsupported, word
from trainer.errors import ConfigError

SECTION = "algorithm.rollout_correction"
_UNSET = ("null", "none", "false")
_CRITERIA = tuple(name for name in get_args(Criterion) if name != "token_veto")
# Names until 0.7, with bounds of the ratio trainer / engine. Today's k1 bounds the inverse ratio.
_EARLIER = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def _setting(given: Given, name: str, default: Value = None) -> Value:
    return given.get(f"{SECTION}.{name}", default)


def bypass_loss(given: Given) -> str | None:
    """The policy loss that bypass mode chooses, whatever `policy_loss.loss_mode` says; None without bypass mode."""
    recomputed = is_true(given.get("async_training.compute_prox_log_prob", False))
    if recomputed or not is_true(_setting(given, "bypass_mode", False)):
        return None
    losses = {"ppo_clip": "ppo", "reinforce": "gpg"}
    chosen = word(_setting(given, "loss_type", "ppo_clip"))
    if chosen not in losses:
        raise unsupported(f"{SECTION}.loss_type", chosen, losses)
    return losses[chosen]


def _number(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if number <= 0:
        raise ConfigError(f"{key}={text}: expected numbers above 0", hint="like 2.0, or LOWER_UPPER like 0.5_2.0")
    return number


def rollout_is(key: str, value: Value, given: Given) -> Translation:
    """A threshold LOWER_UPPER sets weights outside to 0, a number bounds them."""
    threshold = word(_setting(given, "rollout_is_threshold", 2.0))
    if word(value) in _UNSET or threshold == "null":
        return Translation({})
    if bypass_loss(given) == "ppo":
        return Translation({}, f"{key} has no effect: in bypass mode, the ratio of ppo_clip corrects for the engine")
    low, band, high = threshold.rpartition("_")
    names = {"token": "icepop", "sequence": "sequence_icepop"} if band else {"token": "tis", "sequence": "sequence_tis"}
    if word(value) not in names:
        raise unsupported(key, value, names)
    threshold_key = f"{SECTION}.rollout_is_threshold"
    bounds: dict[str, Value] = {"algorithm.correction_high": _number(threshold_key, high)}
    if band:
        bounds["algorithm.correction_low"] = _number(threshold_key, low)
    return Translation({"algorithm.correction": names[word(value)], **bounds})


def normalize(_key: str, value: Value, given: Given) -> Translation:
    weights = rollout_is(f"{SECTION}.rollout_is", _setting(given, "rollout_is"), given).settings
    return Translation({"algorithm.correction_normalize": value} if weights else {})


def rejection(_key: str, _value: Value, given: Given) -> Translation:
    """All criteria with their bounds."""
    bounds: dict[str, Value] = {}
    chosen = _setting(given, "rollout_rs")
    names = [word(name) for name in chosen] if isinstance(chosen, list) else word(chosen).split(",")
    criteria = list(dict.fromkeys(name.strip() for name in names if name.strip() not in ("", *_UNSET)))
    if criteria:
        threshold = _setting(given, "rollout_rs_threshold")
        if word(threshold) == "null":
            raise ConfigError(f"{SECTION}.rollout_rs needs bounds", hint=f"set {SECTION}.rollout_rs_threshold")
        parts = [part.strip() for part in word(threshold).split(",")]
        parts = parts * len(criteria) if len(parts) == 1 else parts
        if len(parts) != len(criteria):
            raise ConfigError(
                f"{SECTION}.rollout_rs_threshold={threshold}: {len(parts)} bounds for {len(criteria)} criteria",
                hint="give one bound for all, or one for each",
            )
        bounds = {
            _EARLIER.get(name, name): _bound(name, part, given) for name, part in zip(criteria, parts, strict=True)
        }
    veto = _setting(given, "rollout_token_veto_threshold")
    if word(veto) not in _UNSET:
        bounds["token_veto"] = _number(f"{SECTION}.rollout_token_veto_threshold", word(veto))
    return Translation({"algorithm.rejection": bounds} if bounds else {})


def _bound(name: str, text: str, given: Given) -> Value:
    """Our bound of a criterion: a number, or smallest and largest ratio trainer / engine."""
    key = f"{SECTION}.rollout_rs_threshold"
    if name in _EARLIER:
        high, lower = _number(key, text), word(_setting(given, "rollout_rs_threshold_lower"))
        return [1 / high if lower == "null" else _number(key, lower), high]
    if name not in _CRITERIA:
        raise unsupported(f"{SECTION}.rollout_rs", name, _CRITERIA)
    lower, band, upper = text.rpartition("_")
    if not band:
        return _number(key, text)
    return [1 / _number(key, upper), 1 / _number(key, lower)]


def bypass_mode(_key: str, _value: Value, given: Given) -> Translation:
    loss = bypass_loss(given)
    return Translation({"algorithm.old_log_probs": "engine", "actor.policy_loss": loss} if loss else {})


def read_with(_key: str, _value: Value, _given: Given) -> Translation:
    """For a value that the rule of another key reads."""
    return Translation({})


RULES: dict[str, Rule] = {
    SECTION: only("null"),
    f"{SECTION}.rollout_is": rollout_is,
    f"{SECTION}.rollout_is_threshold": read_with,
    f"{SECTION}.rollout_is_batch_normalize": normalize,
    f"{SECTION}.rollout_rs": rejection,
    f"{SECTION}.rollout_rs_threshold": read_with,
    f"{SECTION}.rollout_rs_threshold_lower": read_with,
    f"{SECTION}.rollout_token_veto_threshold": rejection,
    f"{SECTION}.bypass_mode": bypass_mode,
    f"{SECTION}.loss_type": read_with,
}
