"""The elementwise optimizers of torch, which work on sharded weights.

Adafactor and Muon look at whole matrices, of which a rank holds only a part.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.rows import Parameter, Row


@dataclass(frozen=True, kw_only=True)
class Optimizer(Row):
    """A class of `torch.optim` and its arguments, by the names of the settings.

    `fused` says that torch has one kernel for all weights on GPUs. `states(**parameters)` is the number of float32
    values that it keeps for each trained number.
    """

    torch: str
    arguments: Mapping[str, str]
    fused: bool = False
    states: Callable[..., int]


BETAS = Parameter(
    type=tuple[float, float],
    default=(0.9, 0.999),
    description="Adam's family: decay rates of the first and the second moment",
)
EPSILON = Parameter(
    type=float | None,
    description="all but sgd: added to the divisor; null: torch's default, 1e-8, or 1e-10 for adagrad",
    constraints={"gt": 0},
)
AMSGRAD = Parameter(type=bool, default=False, description="adamw, adam: divide by the largest second moment so far")
MOMENTUM = Parameter(
    type=float, default=0.0, description="sgd, rmsprop: momentum; 0: none", constraints={"ge": 0, "lt": 1}
)
DAMPENING = Parameter(type=float, default=0.0, description="sgd: dampening of the momentum", constraints={"ge": 0})
NESTEROV = Parameter(type=bool, default=False, description="sgd: Nesterov's momentum")
SMOOTHING = Parameter(
    type=float,
    default=0.99,
    description="rmsprop: decay rate of the mean square",
    constraints={"ge": 0, "lt": 1},
)
CENTERED = Parameter(type=bool, default=False, description="rmsprop: divide by the standard deviation of the gradient")
LR_DECAY = Parameter(
    type=float, default=0.0, description="adagrad: decay of the learning rate per optimizer step", constraints={"ge": 0}
)
INITIAL = Parameter(type=float, default=0.0, description="adagrad: first value of its sums", constraints={"ge": 0})
DECOUPLED = Parameter(
    type=bool, default=False, description="nadam, radam: weight decay beside the gradient, as in adamw"
)

_ADAM = {"betas": BETAS, "epsilon": EPSILON}
_ARGUMENTS = {
    "betas": "betas",
    "epsilon": "eps",
    "amsgrad": "amsgrad",
    "momentum": "momentum",
    "dampening": "dampening",
    "nesterov": "nesterov",
    "smoothing": "alpha",
    "centered": "centered",
    "learning_rate_decay": "lr_decay",
    "initial_accumulator": "initial_accumulator_value",
    "decoupled_weight_decay": "decoupled_weight_decay",
}


def _row(
    name: str, torch: str, parameters: Mapping[str, Parameter], states: Callable[..., int], fused: bool = False
) -> Optimizer:
    arguments = {parameter: _ARGUMENTS[parameter] for parameter in parameters}
    return Optimizer(name=name, torch=torch, parameters=parameters, arguments=arguments, states=states, fused=fused)


OPTIMIZERS = {
    row.name: row
    for row in (
        _row("adamw", "AdamW", {**_ADAM, "amsgrad": AMSGRAD}, lambda amsgrad, **_: 2 + amsgrad, fused=True),
        _row("adam", "Adam", {**_ADAM, "amsgrad": AMSGRAD}, lambda amsgrad, **_: 2 + amsgrad, fused=True),
        _row("adamax", "Adamax", _ADAM, lambda **_: 2),
        _row("nadam", "NAdam", {**_ADAM, "decoupled_weight_decay": DECOUPLED}, lambda **_: 2),
        _row("radam", "RAdam", {**_ADAM, "decoupled_weight_decay": DECOUPLED}, lambda **_: 2),
        _row(
            "sgd",
            "SGD",
            {"momentum": MOMENTUM, "dampening": DAMPENING, "nesterov": NESTEROV},
            lambda momentum, **_: int(momentum > 0),
            fused=True,
        ),
        _row(
            "rmsprop",
            "RMSprop",
            {"epsilon": EPSILON, "momentum": MOMENTUM, "smoothing": SMOOTHING, "centered": CENTERED},
            lambda momentum, centered, **_: 1 + int(momentum > 0) + centered,
        ),
        _row(
            "adagrad",
            "Adagrad",
            {"epsilon": EPSILON, "learning_rate_decay": LR_DECAY, "initial_accumulator": INITIAL},
            lambda **_: 1,
        ),
    )
}
