"""Learning-rate schedules: the factor on the learning rate at each update.

An update is one training step of a role, with all its optimizer steps. Updates count from 0, so the first update of a
warm-up has rate 0, as in Transformers and verl.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainer.rows import Parameter, Row


@dataclass(frozen=True)
class Position:
    """An update after the warm-up: its number, the updates of the warm-up, and those of the whole schedule."""

    update: int
    warmup: int
    total: int

    @property
    def progress(self) -> float:
        """The share of the updates after the warm-up that are done; 1 from the end on."""
        return min(1.0, (self.update - self.warmup) / max(1, self.total - self.warmup))


@dataclass(frozen=True, kw_only=True)
class Schedule(Row):
    """`factor(position, **parameters)` returns the factor after the warm-up."""

    factor: Callable[..., float]


def learning_rate_factor(schedule: Schedule, update: int, warmup: int, total: int, **parameters: float | str) -> float:
    """The factor on the learning rate at an update: linear from 0 during the warm-up, then the schedule's."""
    if update < warmup:
        return update / warmup
    return schedule.factor(Position(update, warmup, total), **parameters)


def constant(_position: Position) -> float:
    return 1.0


def linear(position: Position, min_ratio: float) -> float:
    return min_ratio + (1 - min_ratio) * (1 - position.progress)


def cosine(position: Position, min_ratio: float, cycles: float) -> float:
    """Cosine decay (Loshchilov and Hutter 2017, arXiv:1608.03983)."""
    return min_ratio + (1 - min_ratio) * _wave(position.progress, cycles)


def inverse_sqrt(position: Position) -> float:
    """Inverse square root (Vaswani et al. 2017, arXiv:1706.03762), scaled to start at 1."""
    timescale = position.warmup or 10_000
    return 1 / math.sqrt(1 + (position.update - position.warmup) / timescale)


def warmup_stable_decay(position: Position, min_ratio: float, cycles: float, stable_ratio: float, decay: str) -> float:
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)."""
    remaining = max(0, position.total - position.warmup)
    stable = int(remaining * stable_ratio)
    past = position.update - position.warmup - stable
    if past < 0:
        return 1.0
    if position.update >= position.total:
        return min_ratio
    progress = past / max(1, remaining - stable)
    return min_ratio + (1 - min_ratio) * DECAYS[decay](progress, cycles)


def _wave(progress: float, cycles: float) -> float:
    return 0.5 * (1 + math.cos(2 * math.pi * cycles * progress))


# From 1 at progress 0 to 0 at progress 1.
DECAYS: dict[str, Callable[[float, float], float]] = {
    "cosine": _wave,
    "linear": lambda progress, _cycles: 1 - progress,
    "1-sqrt": lambda progress, _cycles: 1 - math.sqrt(progress),
}

MIN_RATIO = Parameter(
    type=float,
    default=0.0,
    description="cosine, linear, wsd: lowest rate, as a share of learning_rate",
    constraints={"ge": 0, "le": 1},
)
CYCLES = Parameter(
    type=float,
    default=0.5,
    description="cosine, wsd: waves of the cosine; 0.5: it only falls",
    constraints={"gt": 0},
)
STABLE_RATIO = Parameter(
    type=float,
    default=0.9,
    description="wsd: share of the updates after the warm-up that keep the full rate",
    constraints={"ge": 0, "le": 1},
)
DECAY = Parameter(type=Literal["cosine", "linear", "1-sqrt"], default="cosine", description="wsd: shape of the decay")

SCHEDULES = {
    row.name: row
    for row in (
        Schedule(name="constant", factor=constant),
        Schedule(name="cosine", factor=cosine, parameters={"min_ratio": MIN_RATIO, "cycles": CYCLES}),
        Schedule(name="linear", factor=linear, parameters={"min_ratio": MIN_RATIO}),
        Schedule(
            name="wsd",
            factor=warmup_stable_decay,
            parameters={"min_ratio": MIN_RATIO, "cycles": CYCLES, "stable_ratio": STABLE_RATIO, "decay": DECAY},
        ),
        Schedule(name="inverse_sqrt", factor=inverse_sqrt),
    )
}
