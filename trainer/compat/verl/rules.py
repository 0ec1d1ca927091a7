"""Rules that turn a setting of verl into ours. Each section's file assigns one to each key."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from trainer.errors import ConfigError

Value = str | int | float | bool | list["Value"] | dict[str, "Value"] | None
"""A value as YAML reads it. Scalars of the command line are text until a setting's type reads them."""

Given = Mapping[str, Value]

KL_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}


# Parts of verl's keys, and the feature that they ask for. The first match counts.
_FEATURES = {
    r"expert|moe|router|routing": "such setting for experts",
    r"image|video|audio|vision|mm_processor|multi_modal": "vision",
    r"\.mtp\b": "multi-token prediction",
    r"\bqat\b|quantization": "quantisation",
    r"disaggregation": "separate prefill engines",
    r"transfer_queue": "transfer queue",
}


@dataclass(frozen=True)
class Translation:
    """Our settings for one of verl's, and a note for the user where behaviour differs.

    verl copies some values from one role to another. A role's own setting overrides such an `inherited` one. `computed`
    settings follow from several keys and override what any key of that name says. `ignored`: the key never has an
    effect, so its default needs no note.
    """

    settings: dict[str, Value]
    note: str = ""
    ignored: bool = False
    inherited: dict[str, Value] = field(default_factory=dict)
    computed: dict[str, Value] = field(default_factory=dict)


_DEFAULT_SEEDS = ("42", "null")
# Seeds that others must agree with, and values that count as not given.
_SEEDS = {"data.seed": ("null",), "trainer.seed": ("null",), "actor_rollout_ref.rollout.seed": _DEFAULT_SEEDS}

Rule = Callable[[str, Value, Given], Translation]
"""Takes a key, its value, and all settings given, the latest last."""


def word(value: Value) -> str:
    """A scalar in lower case as YAML spells it: `true`, `null`, `1`."""
    return "null" if value is None else str(value).lower()


def whole(value: Value) -> int | None:
    """A whole number; None for anything else."""
    text = word(value)
    return int(text) if text.removeprefix("-").isdecimal() else None


def number(value: Value) -> float | None:
    """A number; None for anything else."""
    try:
        return float(str(value))
    except ValueError:
        return None


def typed(value: Value) -> Value:
    """A value as Hydra reads it: numbers, truth values and null are recognised in text."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return {"true": True, "false": False, "null": None}.get(value.lower(), value)


def is_true(value: Value) -> bool:
    return word(value) == "true"


def to(*ours: str, inherited: Sequence[str] = ()) -> Rule:
    """The same value under our keys."""
    return lambda _key, value, _given: Translation(
        dict.fromkeys(ours, value), inherited=dict.fromkeys(inherited, value)
    )


def optional(ours: str) -> Rule:
    """Our setting; null keeps its default."""
    return lambda _key, value, _given: Translation({} if word(value) in ("null", "none") else {ours: value})


def turns_on(ours: str) -> Rule:
    """Our switch for the whole run, which several of verl's sections have each for itself: one that is on suffices."""

    def rule(key: str, value: Value, _given: Given) -> Translation:
        if word(value) not in ("true", "false"):
            raise unsupported(key, value, ("true", "false"))
        return Translation({ours: True} if is_true(value) else {})

    return rule


def mapped(values: Mapping[str, str], ours: str, inherited: Sequence[str] = ()) -> Rule:
    """Our setting, with our word for each value. Other values are refused."""

    def rule(key: str, value: Value, _given: Given) -> Translation:
        if word(value) not in values:
            raise unsupported(key, value, values)
        ours_word = values[word(value)]
        return Translation({ours: ours_word}, inherited=dict.fromkeys(inherited, ours_word))

    return rule


def only(*accepted: str) -> Rule:
    """No setting of ours: the accepted values describe fixed behaviour. Other values are refused."""

    def rule(key: str, value: Value, _given: Given) -> Translation:
        if word(value) not in accepted:
            raise unsupported(key, value, accepted)
        return Translation({})

    return rule


def refused(hint: str) -> Rule:
    """No value but null is accepted. The hint says what to set instead."""

    def rule(key: str, value: Value, _given: Given) -> Translation:
        if word(value) not in ("null", "none", "{}"):
            raise ConfigError(f"{key}={value} is not supported here", hint=hint)
        return Translation({})

    return rule


def no_effect(reason: str) -> Rule:
    """The key is accepted and ignored; the note gives the reason."""
    return lambda key, _value, _given: Translation({}, f"{key} has no effect: {reason}", ignored=True)


def own_code(key: str, value: Value, _given: Given) -> Translation:
    """`trust_remote_code`: accepted, because a model that brings its own code is refused when it is loaded."""
    if word(value) in ("false", "null"):
        return Translation({})
    return no_effect("models and tokenizers run Transformers' own code; those that bring their own are refused")(
        key, value, _given
    )


def no_effects(section: str, names: Iterable[str], reason: str) -> dict[str, Rule]:
    """`no_effect` for several keys of a section."""
    return {f"{section}.{name}": no_effect(reason) for name in names}


def same_seed(key: str, value: Value, given: Given) -> Translation:
    """The run's single seed, for those that verl has besides `data.seed`. Their default counts as not given."""
    if word(value) in _DEFAULT_SEEDS:
        return Translation({})
    for other, unset in _SEEDS.items():
        if word(given.get(other)) not in (word(value), *unset):
            raise ConfigError(
                f"{key}={value} contradicts {other}={given[other]}: a run has a single seed",
                hint="give both the same number",
            )
    return Translation({}, inherited={"trainer.seed": value})


def loader_seed(*shuffles: str) -> Rule:
    """The seed of the order of mini-batches. The first of these switches that is given decides if there is one."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if is_true(next((given[switch] for switch in shuffles if switch in given), False)):
            return same_seed(key, value, given)
        return no_effect("mini-batches keep the order of the batch; see trainer.seed")(key, value, given)

    return rule


def samples_per_prompt(given: Given, default: int = 1) -> int | None:
    """Responses to each prompt; None if it is no whole number."""
    names = ("rollout.samples_per_prompt", "actor_rollout_ref.rollout.n")
    return whole(next((given[name] for name in reversed(list(given)) if name in names), default))  # the latest


def to_responses(ours: str, inherited: Sequence[str] = ()) -> Rule:
    """Converts a mini-batch size: verl counts prompts, we count responses."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        prompts, per_prompt = whole(value), samples_per_prompt(given)
        if prompts is None:
            raise ConfigError(f"{key}={value}: expected a whole number", hint="it counts prompts per optimizer step")
        if per_prompt is None:
            return Translation({})  # refused under its own name
        responses = prompts * per_prompt
        return Translation({ours: responses}, inherited=dict.fromkeys(inherited, responses))

    return rule


def per_device(ours: str, group: Callable[[Given], int] = lambda _given: 1) -> Rule:
    """Converts a micro-batch size: verl's older setting counts the responses of all groups of so many devices."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if word(value) == "null":
            return Translation({})
        total = whole(value)
        sizes = [
            whole(given.get(f"trainer.{name}", number)) for name, number in (("nnodes", 1), ("n_gpus_per_node", 8))
        ]
        if total is None or None in sizes:
            raise ConfigError(f"{key}={value}: expected a whole number", hint=f"set {key}_per_gpu instead")
        groups = prod(size or 1 for size in sizes) // group(given)
        return Translation({ours: max(1, total // max(1, groups))})

    return rule


def dynamic_batches(ours: str, tokens: int) -> Rule:
    """verl's switch for micro-batches of so many tokens by default; the limit itself is another key."""
    return lambda _key, value, _given: Translation({}, inherited={ours: tokens} if is_true(value) else {})


def switch(companion: str, ours: str, default: float) -> Rule:
    """A switch with a companion coefficient. Off sets 0; on sets the given coefficient, or verl's default."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if word(value) not in ("true", "false"):
            raise unsupported(key, value, ("true", "false"))
        return Translation({ours: given.get(companion, default) if is_true(value) else 0.0})

    return rule


def switched_by(switch_key: str, ours: str, inherited: str = "") -> Rule:
    """A value that has an effect only if its switch is on. A missing switch takes the value of `inherited`."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if is_true(given.get(switch_key, given.get(inherited, False))):
            return Translation({ours: value})
        return Translation({}, f"{key} has no effect: {switch_key} is not true", ignored=True)

    return rule


def unsupported(key: str, value: Value, accepted: Iterable[str]) -> ConfigError:
    """The error for a value that asks for a feature that does not exist here. It names well-known features."""
    feature = next((feature for pattern, feature in _FEATURES.items() if re.search(pattern, key)), "")
    reason = f": there is no {feature}" if feature else ""
    return ConfigError(f"{key}={value} is not supported here{reason}", hint=f"supported: {', '.join(accepted)}")
