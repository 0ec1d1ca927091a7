"""What the watchdogs look for and do; see `trainer.runs.watchdogs`."""

from typing import Literal

from pydantic import Field

from trainer.config.section import Section


class Watchdog(Section):
    """Rings when a figure of the last `window` steps passes the threshold."""

    action: Literal["off", "log", "skip", "roll_back", "stop"] = Field(
        "log",
        description="log: say so; skip: leave out the step's updates; roll_back: go back to the last checkpoint's "
        "weights; stop: save and end the run",
    )
    threshold: float = Field(0.0, description="the figure that is still fine")
    window: int = Field(1, gt=0, description="steps looked at")


class RewardDeviation(Watchdog):
    threshold: float = Field(0.5, ge=0, description="standard deviation of the mean reward")
    window: int = Field(10, gt=1, description="steps looked at")


class LargestKl(Watchdog):
    threshold: float = Field(1.0, gt=0, description="KL to the reference in nats per token")


class SmallestEntropy(Watchdog):
    threshold: float = Field(0.01, ge=0, description="entropy in nats per token; less is an alarm")


class RatioDrift(Watchdog):
    threshold: float = Field(0.1, ge=0, le=1, description="share of tokens with engine / trainer outside [0.9, 1.1]")


class MemoryGrowth(Watchdog):
    threshold: float = Field(0.1, description="GiB per step, of the memory in use on the controller's node")
    window: int = Field(50, gt=1, description="steps looked at")


class WatchdogsConfig(Section):
    non_finite_gradients: Literal["skip", "stop"] = Field(
        "stop", description="skip: leave out the optimizer step of a mini-batch whose gradient is no number"
    )
    reward_deviation: RewardDeviation = RewardDeviation()
    kl: LargestKl = LargestKl()
    entropy: SmallestEntropy = SmallestEntropy()
    ratio_drift: RatioDrift = RatioDrift()
    memory_growth: MemoryGrowth = MemoryGrowth()
