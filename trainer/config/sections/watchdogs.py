"""Settings of the watchdogs; see `trainer.runs.recovery.watchdogs`."""

from typing import Literal

from pydantic import Field

from trainer.config.section import Section


class Watchdog(Section):
    """Raises an alarm when a metric of the last `window` steps crosses the threshold."""

    action: Literal["off", "log", "skip", "roll_back", "stop"] = Field(
        "log",
        description="log: write a warning; skip: skip the step's updates; roll_back: return to the weights of the "
        "last checkpoint from before the fault; stop: save and end the run",
    )
    threshold: float = Field(0.0, description="limit of the metric")
    window: int = Field(1, gt=0, description="number of latest steps to look at")


class RewardDeviation(Watchdog):
    threshold: float = Field(0.5, ge=0, description="standard deviation of the mean reward")
    window: int = Field(10, gt=1, description="number of latest steps to look at")


class LargestKl(Watchdog):
    threshold: float = Field(1.0, gt=0, description="KL to the reference in nats per token")


class SmallestEntropy(Watchdog):
    threshold: float = Field(0.01, ge=0, description="entropy in nats per token; lower values raise the alarm")


class RatioDrift(Watchdog):
    threshold: float = Field(0.1, ge=0, le=1, description="share of tokens with engine / trainer outside [0.9, 1.1]")


class MemoryGrowth(Watchdog):
    threshold: float = Field(0.1, description="GiB per step, of the memory in use on the controller's node")
    window: int = Field(50, gt=1, description="number of latest steps to look at")


class WatchdogsConfig(Section):
    non_finite_gradients: Literal["skip", "stop"] = Field(
        "stop",
        description="skip: skip the optimizer step of a mini-batch with a non-finite gradient; stop: end the run",
    )
    reward_deviation: RewardDeviation = RewardDeviation()
    kl: LargestKl = LargestKl()
    entropy: SmallestEntropy = SmallestEntropy()
    ratio_drift: RatioDrift = RatioDrift()
    memory_growth: MemoryGrowth = MemoryGrowth()
