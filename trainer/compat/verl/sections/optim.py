"""Keys of verl's sections `optim`, which actor and critic have.

verl steps a learning-rate schedule once per training step, over the steps of the run, as `schedule` does here. Keys of
an engine's optimizer have an effect only for a role that trains with this engine.
"""

from trainer.algorithms.optimization.optimizers import OPTIMIZERS
from trainer.compat.verl.rules import (
    Given,
    Rule,
    Translation,
    Value,
    is_true,
    mapped,
    no_effect,
    number,
    only,
    to,
    unsupported,
    whole,
    word,
)
from trainer.compat.verl.sections.asynchronous import updates_per_step
from trainer.compat.verl.shared import ACTOR
from trainer.compat.verl.subsections.groups import ACTOR_ROLE, CRITIC_ROLE, ENGINES, Role, of_engine
from trainer.errors import ConfigError

_NAMES = {row.torch.lower(): row.name for row in OPTIMIZERS.values()}
_ARGUMENTS = {theirs: ours for row in OPTIMIZERS.values() for ours, theirs in row.arguments.items()}
_KERNELS = ("foreach", "fused", "capturable", "differentiable")
# Arguments of Megatron's optimizer that choose where and how it computes.
_MEGATRON_PLACES = (
    *("optimizer_cpu_offload", "optimizer_offload_fraction", "offload_fraction", "overlap_cpu_optimizer_d2h_h2d"),
    *("use_precision_aware_optimizer", "pin_cpu_grads", "pin_cpu_params"),
)
_STYLES = ("warmup_style", "lr_scheduler_type")
_MEGATRON_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine"}


class _Section:
    """The rules of one optimizer section of verl's, `theirs`."""

    def __init__(self, theirs: str, role: Role) -> None:
        self._theirs, self._role = theirs, role
        self._optimizer, self._schedule = f"{role.ours}.optimizer", f"{role.ours}.schedule"

    def _megatron(self, given: Given) -> bool:
        return self._role.engine(given) == "megatron"

    def _style(self, given: Given) -> str:
        """The schedule that the section asks for, by our name."""
        engine = self._role.engine(given)
        names = {"megatron": ("lr_decay_style",), "torchtitan": ("decay_type",)}.get(engine, _STYLES)
        chosen = [word(given[key]) for name in names if (key := f"{self._theirs}.{name}") in given]
        default = ENGINES[engine].schedule if engine in ENGINES else "constant"
        return next((name for name in chosen if name != "null"), default)

    def weight_decay(self, _key: str, value: Value, given: Given) -> Translation:
        """Megatron's optimizer leaves out biases and norms."""
        decayed = {f"{self._role.ours}.optimizer.decay_biases_and_norms": False} if self._megatron(given) else {}
        return Translation({f"{self._role.ours}.weight_decay": value, **decayed})

    def optimizer(self, key: str, value: Value, given: Given) -> Translation:
        names = {**_NAMES, "adam": "adamw"} if self._megatron(given) else _NAMES  # Megatron's Adam decouples the decay
        if word(value) not in names:
            raise unsupported(key, value, (row.torch for row in OPTIMIZERS.values()))
        return Translation({f"{self._optimizer}.name": names[word(value)]})

    def betas(self, key: str, value: Value, given: Given) -> Translation:
        if "adam" in word(given.get(f"{self._theirs}.optimizer", "AdamW")):
            return Translation({f"{self._optimizer}.betas": value})
        return Translation({}, f"{key} has no effect: the optimizer has no betas")

    def scheduler(self, key: str, value: Value, given: Given) -> Translation:
        if word(value) == "null":
            return Translation({})
        if word(value) not in ("constant", "cosine"):
            raise unsupported(key, value, ("constant", "cosine"))
        if word(value) == "cosine" and updates_per_step(given) > 1:
            raise ConfigError(
                f"{key}=cosine: verl ends this schedule after 1/{updates_per_step(given)} of an asynchronous run",
                hint="set it to constant, or give actor.schedule.name and actor.schedule.total_steps",
            )
        return Translation({f"{self._schedule}.name": self._style(given)})

    def of_cosine(self, ours: str) -> Rule:
        """A setting of the cosine schedule."""

        def rule(key: str, value: Value, given: Given) -> Translation:
            if self._style(given) != "cosine":
                return Translation({}, f"{key} has no effect: lr_scheduler_type is not cosine", ignored=True)
            return Translation({} if word(value) == "null" else {f"{self._schedule}.{ours}": value})

        return rule

    def _warmup_steps(self, given: Given) -> int:
        return whole(given.get(f"{self._theirs}.lr_warmup_steps")) or 0

    def warmup_steps(self, key: str, value: Value, given: Given) -> Translation:
        if word(value) not in ("null", "none") and whole(value) is None:
            raise ConfigError(f"{key}={value}: expected a whole number or null", hint="it counts training steps")
        steps, updates = whole(value) or 0, updates_per_step(given)
        if steps > 0 and self._role.engine(given) == "veomni":
            return Translation({}, f"{key} has no effect: verl reads lr_warmup_steps_ratio alone with veomni")
        if steps > 0:
            self._no_warmup_of_torchtitan(key, value, given)
        if steps <= 0 or updates == 1:
            return Translation({f"{self._schedule}.warmup_steps": value} if steps > 0 else {})
        ours = -(-steps // updates)
        return Translation(
            {f"{self._schedule}.warmup_steps": ours, f"{self._schedule}.zero_indexed": False},
            f"{key}={value}: the learning rate changes once per step of {updates} updates, rising for {ours} steps",
        )

    def warmup_ratio(self, key: str, value: Value, given: Given) -> Translation:
        if self._warmup_steps(given) > 0 and self._role.engine(given) != "veomni":
            return Translation({}, f"{key} has no effect: {self._theirs}.lr_warmup_steps counts", ignored=True)
        if updates_per_step(given) > 1 and number(value):
            raise ConfigError(
                f"{key}={value}: verl takes it of the transfers of weights, and counts it in updates",
                hint=f"set {self._theirs}.lr_warmup_steps to a number of updates",
            )
        if number(value):
            self._no_warmup_of_torchtitan(key, value, given)
        return Translation({f"{self._schedule}.warmup_ratio": value})

    def _no_warmup_of_torchtitan(self, key: str, value: Value, given: Given) -> None:
        if self._role.engine(given) == "torchtitan":
            raise ConfigError(
                f"{key}={value} is not supported here: torchtitan's warm-up is one update ahead of verl's others",
                hint=f"leave it out, or set {self._schedule}.warmup_steps",
            )

    def of(self, engine: str, inner: Rule) -> Rule:
        """A rule that applies with this engine of verl's only."""
        return of_engine(self._role, engine, inner)

    def of_megatron(self, inner: Rule) -> Rule:
        return self.of("megatron", inner)

    def decay_steps(self, _key: str, value: Value, given: Given) -> Translation:
        if word(value) == "null" or self._style(given) == "constant":
            return Translation({})
        return Translation({f"{self._schedule}.total_steps": value})

    def min_lr(self, key: str, value: Value, given: Given) -> Translation:
        """verl's lowest rate as a share of the rate."""
        rate = number(given.get(f"{self._theirs}.lr", "1e-6"))
        lowest = number(value)
        if lowest is None or not rate:
            raise ConfigError(f"{key}={value}: expected a number", hint=f"{self._theirs}.lr must be one as well")
        if self._style(given) == "constant":
            return Translation({})
        return Translation({f"{self._schedule}.min_ratio": lowest / rate})

    def offload(self, _key: str, value: Value, _given: Given) -> Translation:
        sharding = f"{self._optimizer.removesuffix('.optimizer')}.sharding"
        return Translation({f"{sharding}.optimizer_offload": True} if is_true(value) else {})

    def arguments(self, key: str, value: Value, given: Given) -> Translation:
        """The mapping of further arguments, if it is given as a whole."""
        if not isinstance(value, dict):
            return only("null", "none")(key, value, given)
        settings: dict[str, Value] = {}
        for name, argument in value.items():
            inner = self.argument_rules().get(name)
            if inner is None:
                raise unsupported(f"{key}.{name}", argument, self.argument_rules())
            settings |= inner(f"{key}.{name}", argument, given).settings
        return Translation(settings)

    def argument_rules(self) -> dict[str, Rule]:
        """The rule of each argument of an optimizer."""
        kernels = no_effect("the trainer chooses the kernels; results are the same")
        places = no_effect("see sharding.optimizer_offload; optimizer state is float32")
        return {
            **{theirs: to(f"{self._optimizer}.{ours}") for theirs, ours in _ARGUMENTS.items()},
            **dict.fromkeys(_KERNELS, kernels),
            **{name: self.of_megatron_only(places) for name in _MEGATRON_PLACES},
            "optimizer_cpu_offload": self.of_megatron_only(self.offload),
        }

    def of_megatron_only(self, inner: Rule) -> Rule:
        """An argument that other optimizers refuse, in verl as well, unless it is off."""

        def rule(key: str, value: Value, given: Given) -> Translation:
            if self._megatron(given) or word(value) in ("false", "0", "0.0"):
                return inner(key, value, given)
            raise ConfigError(f"{key}={value}: torch's optimizers have no such argument", hint="leave it out")

        return rule


def clip(other: str, ours: str) -> Rule:
    """The largest gradient norm, which verl has under two keys. They must agree."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if other in given and number(given[other]) != number(value):
            raise ConfigError(f"{key}={value} contradicts {other}={given[other]}", hint=f"give only {key}")
        return Translation({ours: value})

    return rule


def optimizer_rules(theirs: str, role: Role) -> dict[str, Rule]:
    """The keys of one of verl's optimizer sections, and the key for clipping beside it."""
    parent = theirs.removesuffix(".optim")
    section = _Section(theirs, role)
    norm, schedule = f"{role.ours}.max_gradient_norm", f"{role.ours}.schedule.name"
    rules: dict[str, Rule] = {
        "lr": to(f"{role.ours}.learning_rate"),
        "weight_decay": section.weight_decay,
        "clip_grad": clip(f"{parent}.grad_clip", norm),
        "optimizer": section.optimizer,
        "optimizer_impl": only("torch.optim"),
        "betas": section.betas,
        "override_optimizer_config": section.arguments,
        **{f"override_optimizer_config.{name}": rule for name, rule in section.argument_rules().items()},
        "lr_scheduler_type": section.scheduler,
        "warmup_style": section.scheduler,
        "lr_warmup_steps": section.warmup_steps,
        "lr_warmup_steps_ratio": section.warmup_ratio,
        "min_lr_ratio": section.of_cosine("min_ratio"),
        "num_cycles": section.of_cosine("cycles"),
        "zero_indexed_step": section.of_cosine("zero_indexed"),
        "total_training_steps": no_effect("verl replaces it by the steps of the run"),
        "lr_decay_style": section.of_megatron(mapped(_MEGATRON_STYLES, schedule)),
        "lr_decay_steps": section.of_megatron(section.decay_steps),
        "min_lr": section.of_megatron(section.min_lr),
        "lr_warmup_init": section.of_megatron(only("0", "0.0")),
        "weight_decay_incr_style": section.of_megatron(only("constant")),
        "lr_wsd_decay_style": section.of_megatron(no_effect("lr_decay_style is not WSD")),
        "lr_wsd_decay_steps": section.of_megatron(no_effect("lr_decay_style is not WSD")),
        "use_checkpoint_opt_param_scheduler": section.of_megatron(
            no_effect("a resumed run continues its schedule with the learning rate of the settings")
        ),
        "lr_min": section.of("veomni", section.min_lr),
        "lr_start": section.of("veomni", only("0", "0.0")),
        "lr_decay_ratio": section.of("veomni", only("1", "1.0")),
        "name": section.of("torchtitan", section.optimizer),
        "eps": section.of("torchtitan", to(f"{role.ours}.optimizer.epsilon")),
        "decay_type": section.of("torchtitan", mapped({"linear": "linear", "cosine": "cosine"}, schedule)),
        "min_lr_factor": section.of("torchtitan", to(f"{role.ours}.schedule.min_ratio")),
    }
    return {
        f"{parent}.grad_clip": clip(f"{theirs}.clip_grad", norm),
        **{f"{theirs}.{name}": rule for name, rule in rules.items()},
    }


RULES = {**optimizer_rules(f"{ACTOR}.optim", ACTOR_ROLE), **optimizer_rules("critic.optim", CRITIC_ROLE)}
