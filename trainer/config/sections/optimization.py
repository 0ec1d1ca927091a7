"""Settings of an optimizer and its learning rate."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from trainer.algorithms.optimization.optimizers import OPTIMIZERS
from trainer.algorithms.optimization.schedules import SCHEDULES, learning_rate_factor
from trainer.config.section import Section, with_parameters
from trainer.rows import Row

if TYPE_CHECKING:
    OptimizerName = str
    ScheduleName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    ScheduleName = Literal[tuple(SCHEDULES)]


@partial(with_parameters, tables=(OPTIMIZERS,))
class OptimizerConfig(Section):
    name: OptimizerName = Field(
        "adamw", description="optimizer of torch.optim. adafactor and muon need whole matrices, which no rank holds"
    )
    decay_biases_and_norms: bool = Field(
        True, description="false: weight_decay leaves out biases and norms, that is weights of one dimension"
    )

    @model_validator(mode="after")
    def _every_setting_is_read(self) -> Self:
        check_read(self, "name", OPTIMIZERS)
        values = self.model_dump()
        if not all(0 <= beta < 1 for beta in values["betas"]):
            raise ValueError(f"betas={list(values['betas'])}: each is at least 0 and below 1")
        if values["nesterov"] and (not values["momentum"] or values["dampening"]):
            raise ValueError("nesterov=true needs a momentum above 0 and dampening=0")
        return self

    @property
    def arguments(self) -> dict[str, object]:
        """The optimizer's settings as keyword arguments of torch's class, without those that keep torch's default."""
        row = OPTIMIZERS[self.name]
        return {row.arguments[name]: value for name, value in row.values(self).items() if value is not None}

    @property
    def states(self) -> int:
        """Numbers that the optimizer keeps for each trained number."""
        row = OPTIMIZERS[self.name]
        return row.states(**row.values(self))


@partial(with_parameters, tables=(SCHEDULES,))
class ScheduleConfig(Section):
    """Changes `learning_rate` from update to update. An update is a training step of the role."""

    name: ScheduleName = Field("constant", description="learning rate after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="updates in which the rate rises linearly from 0")
    warmup_ratio: float = Field(0.0, ge=0, le=1, description="the same as a share of total_steps, rounded down")
    total_steps: int | None = Field(
        None, gt=0, description="updates of the whole schedule; those of the run if not given"
    )
    zero_indexed: bool = Field(
        True, description="true: the first update has the rate of update 0, which is 0 in a warm-up; false: of update 1"
    )

    @model_validator(mode="after")
    def _every_setting_is_read(self) -> Self:
        check_read(self, "name", SCHEDULES)
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} contradict each other: set one"
            )
        return self

    def factor(self, update: int, run_steps: int) -> float:
        """The factor on the learning rate at an update, counted from 0, of a run with `run_steps` steps."""
        row, total = SCHEDULES[self.name], self.total_steps or run_steps
        warmup = self.warmup_steps or int(self.warmup_ratio * total)
        position = update if self.zero_indexed else update + 1
        return learning_rate_factor(row, position, warmup, total, **row.values(self))


def check_read(section: Section, choice: str, rows: Mapping[str, Row]) -> None:
    """Raises ValueError if a setting was changed that has no effect with the row named by the setting `choice`."""
    name = getattr(section, choice)
    for parameter in (parameter for row in rows.values() for parameter in row.parameters):
        value, default = getattr(section, parameter), type(section).model_fields[parameter].default
        if value != default and parameter not in rows[name].parameters:
            readers = ", ".join(row.name for row in rows.values() if parameter in row.parameters)
            raise ValueError(f"{parameter}={value} has no effect with {choice}={name}; it is read by {readers}")
