"""verl's training engines, and the groups of ranks that they make. Here the sizes are `sharding.context_parallel` and,
for mixtures of experts, `sharding.expert_parallel`.

The ranks of a group of verl's compute the same rows. They split tokens (Ulysses, context parallelism), matrices (tensor
parallelism) or layers (pipeline). Here they split tokens alone, and FSDP2 shards every layer over all ranks of the
role. So sizes for tokens and matrices are multiplied, and pipelines have no effect. In the same way, ranks that divide
experts or their matrices divide whole experts here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from trainer.compat.verl.rules import Given, Rule, Translation, Value, no_effect, unsupported, whole, word
from trainer.compat.verl.sections.asynchronous import updates_per_step
from trainer.compat.verl.shared import ACTOR
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Engine:
    """Names of verl's keys for the ranks of an engine that split tokens, matrices, layers, and experts among them.

    `limit` is the size by which it multiplies a limit of tokens per GPU. `note` says what trains instead. `schedule` is
    the learning-rate schedule that it has by default.
    """

    tokens: str
    matrices: str | None = None
    layers: str | None = None
    experts: str | None = None
    expert_matrices: str | None = None
    limit: str = "tokens"
    note: str = ""
    schedule: str = "constant"


_TRANSFORMERS = "Transformers' layers train with FSDP2"
ENGINES = {
    "fsdp": Engine("ulysses_sequence_parallel_size"),
    "megatron": Engine(
        "context_parallel_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        note=_TRANSFORMERS,
    ),
    "veomni": Engine("ulysses_parallel_size", experts="expert_parallel_size", note=_TRANSFORMERS, schedule="cosine"),
    "torchtitan": Engine(
        "context_parallel_size",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "expert_parallel_size",
        "expert_tensor_parallel_size",
        limit="matrices",
        note=_TRANSFORMERS,
        schedule="linear",
    ),
}
_NAMES = {"fsdp2": "fsdp", "dp": "fsdp"}


@dataclass(frozen=True)
class Role:
    """A trained role: verl's section, ours, and verl's sections of its FSDP engine, the first of which counts."""

    theirs: str
    ours: str
    fsdp: Sequence[str] = ()

    def engine(self, given: Given) -> str:
        """verl's engine. `model_engine` chooses that of every role without a `strategy`."""
        chosen = word(given.get(f"{self.theirs}.strategy", given.get("model_engine", "fsdp")))
        return _NAMES.get(chosen, chosen)

    def differs(self, given: Given) -> bool:
        """Whether a note about the engine is due: the actor's serves for a critic with the same one."""
        return self.ours == "actor" or self.engine(given) != ACTOR_ROLE.engine(given)

    def keeps_megatron(self, given: Given) -> bool:
        """Whether our own setting asks for Megatron-Core's layers, which split matrices."""
        return word(given.get(f"{self.ours}.backend")) == "megatron"

    def size(self, kind: str, given: Given) -> int:
        """Ranks that split `kind`: tokens, matrices, layers, experts or expert_matrices."""
        name = self.engine(given)
        leaf = getattr(ENGINES[name], kind) if name in ENGINES else None
        sections = self.fsdp if name == "fsdp" else (f"{self.theirs}.{name}",)
        keys = [f"{section}.{leaf}".removeprefix(".") for section in sections] if leaf else []
        sizes = [whole(given[key]) or 1 for key in keys if key in given]
        return next((size for size in sizes if size > 1), 1)

    def shares_rows(self, given: Given) -> int:
        """Ranks of a group in verl."""
        return prod(self.size(kind, given) for kind in ("tokens", "matrices", "layers"))

    def splits_tokens(self, given: Given) -> int:
        """Ranks of a group here, `sharding.context_parallel`."""
        tokens = self.size("tokens", given)
        return tokens if self.keeps_megatron(given) else tokens * self.size("matrices", given)


ACTOR_ROLE = Role(ACTOR, "actor", (ACTOR, f"{ACTOR}.fsdp_config"))
CRITIC_ROLE = Role("critic", "critic", ("critic", "critic.fsdp", "critic.fsdp_config", "critic.model.fsdp_config"))
TUNED_ROLE = Role("engine", "actor", ("", "engine"))  # of sft_trainer and fsdp_sft_trainer


def counted(rule: Callable[[str, int, Given], Translation]) -> Rule:
    """A rule for a number of ranks."""

    def checked(key: str, value: Value, given: Given) -> Translation:
        ranks = whole(value)
        if ranks is None or ranks < 1:
            raise ConfigError(f"{key}={value}: expected a whole number above 0", hint="it counts ranks")
        return rule(key, ranks, given)

    return checked


def split_tokens(role: Role) -> Rule:
    """Ranks that split tokens."""
    ours = f"{role.ours}.sharding.context_parallel"
    return counted(lambda _key, _ranks, given: Translation({ours: role.splits_tokens(given)}))


def split_matrices(role: Role) -> Rule:
    """Ranks that split matrices."""

    def rule(key: str, ranks: int, given: Given) -> Translation:
        if role.keeps_megatron(given):
            return Translation({f"{role.ours}.sharding.tensor_parallel": ranks})
        setting = f"{role.ours}.sharding.context_parallel"
        split = role.splits_tokens(given)
        note = f"{key}={ranks}: {setting}={split}, whose ranks split tokens instead of matrices"
        return Translation({setting: split}, note if ranks > 1 else "")

    return counted(rule)


def split_layers(key: str, value: Value, given: Given) -> Translation:
    """Ranks, or parts of a rank's layers, of a pipeline."""
    if word(value) in ("null", "none", "1"):
        return Translation({})
    reason = no_effect("every rank computes all layers, whose weights FSDP2 shards over the ranks")
    return counted(lambda name, ranks, all_given: reason(name, ranks, all_given))(key, value, given)


def split_experts(role: Role, kind: str = "experts") -> Rule:
    """Ranks that divide experts, or their matrices."""

    def rule(key: str, ranks: int, given: Given) -> Translation:
        setting = f"{role.ours}.sharding.expert_parallel"
        divided = role.size("experts", given) * role.size("expert_matrices", given)
        note = f"{key}={ranks}: {setting}={divided}, whose ranks divide whole experts instead of their matrices"
        return Translation({setting: divided}, note if ranks > 1 and kind == "expert_matrices" else "")

    checked = counted(rule)

    def given_or_not(key: str, value: Value, given: Given) -> Translation:
        return Translation({}) if word(value) in ("null", "none") else checked(key, value, given)

    return given_or_not


def per_rank(role: Role, limit: Rule) -> Rule:
    """A limit of tokens. verl's engine multiplies it by one of a group's sizes, we by `sharding.context_parallel`."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        translation = limit(key, value, given)
        engine = ENGINES.get(role.engine(given), ENGINES["fsdp"])
        group, ranks = role.size(engine.limit, given), role.splits_tokens(given)

        def divided(settings: dict[str, Value]) -> dict[str, Value]:
            counts = {ours: whole(count) for ours, count in settings.items()}
            return {
                ours: settings[ours] if count is None else -(-count * group // ranks) for ours, count in counts.items()
            }

        return replace(translation, settings=divided(translation.settings), inherited=divided(translation.inherited))

    return rule


def strategy(role: Role) -> Rule:
    """verl's name of a training engine."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if _NAMES.get(word(value), word(value)) not in ENGINES:
            raise unsupported(key, value, sorted([*_NAMES, *ENGINES]))
        return trained_by(role, key, value, given)

    return rule


def trained_by(role: Role, key: str, value: Value, given: Given) -> Translation:
    """What a role takes over from its engine: the schedule that verl's has by default."""
    engine = ENGINES[_NAMES.get(word(value), word(value))]
    if engine.schedule != "constant" and updates_per_step(given) > 1 and f"{role.ours}.schedule.name" not in given:
        raise ConfigError(
            f"{key}={value}: verl ends its {engine.schedule} schedule before an asynchronous run ends",
            hint=f"set {role.ours}.schedule.name",
        )
    inherited: dict[str, Value] = {f"{role.ours}.backend": "fsdp"}
    if engine.schedule != "constant":
        inherited[f"{role.ours}.schedule.name"] = engine.schedule
    if role.keeps_megatron(given) or not engine.note or not role.differs(given):
        return Translation({}, inherited=inherited)
    hint = f"; {role.ours}.backend=megatron selects Megatron-Core's" if word(value) == "megatron" else ""
    return Translation({}, f"{key}={value}: {engine.note}{hint}", inherited=inherited)


def of_engine(role: Role, name: str, rule: Rule) -> Rule:
    """A rule for a key that has an effect only if the role trains with this engine of verl's."""

    def checked(key: str, value: Value, given: Given) -> Translation:
        if role.engine(given) == name:
            return rule(key, value, given)
        reason = no_effect(f"{role.theirs}.strategy is not {name}")
        return reason(key, value, given)

    return checked
