"""verl's keys for number types.

verl keeps trained weights in `model_dtype` (float32 by default) and computes in `mixed_precision.param_dtype`
(bfloat16). Here all roles and engines of a run compute in one type, `model.dtype`.
"""

from trainer.compat.verl.rules import Given, Rule, Translation, Value, only, unsupported, word
from trainer.compat.verl.shared import ACTOR, MODEL, ROLLOUT
from trainer.errors import ConfigError

_FLOAT32 = dict.fromkeys(("fp32", "float32", "float", "32"), "float32")
_BFLOAT16 = dict.fromkeys(("bf16", "bfloat16"), "bfloat16")
_FLOAT16 = dict.fromkeys(("fp16", "float16", "half", "16"), "float16")
_SECTIONS = (f"{ACTOR}.fsdp_config", "critic.fsdp_config", "critic.model.fsdp_config", "critic.fsdp")
# Keys of the type in which a role or an engine computes.
COMPUTE_KEYS = (
    *(f"{section}.{key}" for section in _SECTIONS for key in ("mixed_precision.param_dtype", "dtype")),
    f"{ACTOR}.megatron.dtype",
    "critic.megatron.dtype",
    f"{MODEL}.torch_dtype",
    f"{ROLLOUT}.dtype",
    "actor.dtype",
    "critic.dtype",
)


def _named(value: Value) -> str:
    return word(value).removeprefix("torch.")


def one_of(names: dict[str, str], ours: str) -> Rule:
    """Our setting for one of these types. Null keeps verl's default, which is ours."""

    def rule(key: str, value: Value, _given: Given) -> Translation:
        if word(value) in ("null", "none"):
            return Translation({})
        if _named(value) not in names:
            raise unsupported(key, value, sorted(set(names.values())))
        return Translation({ours: names[_named(value)]})

    return rule


def compute_type(key: str, value: Value, given: Given) -> Translation:
    """`model.dtype`. Raises ConfigError if roles and engines are to compute in different types."""
    names = _FLOAT32 | _BFLOAT16 | _FLOAT16
    translation = one_of(names, "model.dtype")(key, value, given)
    chosen = translation.settings.get("model.dtype")
    for other in COMPUTE_KEYS if chosen else ():
        named = names.get(_named(given.get(other)), chosen)
        if named != chosen:
            raise ConfigError(
                f"{key}={value} contradicts {other}={given[other]}: roles and engines of a run compute in one type",
                hint="give both the same type, or model.dtype alone",
            )
    training = any(other in given for other in COMPUTE_KEYS if other != f"{ROLLOUT}.dtype") or "model.dtype" in given
    if key == f"{ROLLOUT}.dtype" and chosen not in (None, "bfloat16") and not training:
        raise ConfigError(
            f"{key}={value}: verl's roles compute in bfloat16, and here roles and engines of a run compute in one type",
            hint=f"set model.dtype={chosen} for all of them",
        )
    return translation


def model_type(key: str, value: Value, given: Given) -> Translation:
    """A key outside verl's configuration that some of its scripts give."""
    translation = compute_type(key, value, given)
    note = f"{key} is the type in which all roles compute: trained weights have actor.weights_dtype"
    return Translation(translation.settings, note if translation.settings else "")


def dtype_rules(theirs: str, role: str) -> dict[str, Rule]:
    """The types of one of verl's FSDP sections."""
    inner: dict[str, Rule] = {
        "param_dtype": compute_type,
        "reduce_dtype": one_of(_FLOAT32 | _BFLOAT16, f"{role}.sharding.gradient_dtype"),
        "buffer_dtype": only("fp32", "float32", "32", "null"),
    }

    def whole_mapping(key: str, value: Value, given: Given) -> Translation:
        if not isinstance(value, dict):
            return only("null", "none")(key, value, given)
        settings: dict[str, Value] = {}
        for name, chosen in value.items():
            if name not in inner:
                raise ConfigError(f"{key}.{name}: there is no such setting", hint=f"known: {', '.join(inner)}")
            settings |= inner[name](f"{key}.{name}", chosen, given).settings
        return Translation(settings)

    return {
        f"{theirs}.model_dtype": one_of(_FLOAT32 | _BFLOAT16, f"{role}.weights_dtype"),
        f"{theirs}.dtype": compute_type,
        f"{theirs}.mixed_precision": whole_mapping,
        **{f"{theirs}.mixed_precision.{name}": rule for name, rule in inner.items()},
    }
