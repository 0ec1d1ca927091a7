"""What keeps small gradients alive in float16."""

from dataclasses import dataclass

import torch

GROWTH_INTERVAL = 2000  # steps without an overflow before a larger scale is tried
FIRST_SCALE = 2.0**16


@dataclass
class LossScale:
    """The factor of the loss before the backward pass, taken off the gradients before the optimizer step.

    Numbers below 6e-8 are 0 in float16, and gradients often are that small. The scale is as large as it can be: halved
    when a gradient overflows, doubled after `GROWTH_INTERVAL` steps without (Micikevicius et al. 2018,
    arXiv:1710.03740). The other types have the range of float32: their scale is always 1.
    """

    value: float = 1.0
    good_steps: int = 0
    dynamic: bool = False

    @classmethod
    def of(cls, dtype: torch.dtype) -> "LossScale":
        return cls(FIRST_SCALE, dynamic=True) if dtype == torch.float16 else cls()

    def accepts(self, finite: bool) -> bool:
        """Takes note of a step; False if its gradient is no finite number and a smaller scale cannot help."""
        if not self.dynamic:
            return finite
        if finite:
            self.good_steps += 1
            if self.good_steps == GROWTH_INTERVAL:
                self.value, self.good_steps = self.value * 2, 0
            return True
        self.value, self.good_steps = self.value / 2, 0
        return self.value >= 1.0

    def state(self) -> torch.Tensor:
        """What a checkpoint holds."""
        return torch.tensor([self.value, self.good_steps], dtype=torch.float64)

    def restore(self, state: torch.Tensor) -> None:
        self.value, self.good_steps = float(state[0]), int(state[1])
