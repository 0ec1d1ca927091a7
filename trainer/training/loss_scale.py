"""Dynamic loss scaling, which keeps small gradients from vanishing in float16."""

from dataclasses import dataclass

import torch

GROWTH_INTERVAL = 2000  # steps without an overflow before a larger scale is tried
FIRST_SCALE = 2.0**16


@dataclass
class LossScale:
    """The factor that multiplies the loss; gradients are divided by it before the optimizer step.

    Float16 rounds numbers below 6e-8 to 0, and gradients are often that small. The scale is kept as large as possible:
    it is halved when a gradient overflows and doubled after `GROWTH_INTERVAL` steps without an overflow (Micikevicius
    et al. 2018, arXiv:1710.03740). For other types, which have the range of float32, it is always 1.
    """

    value: float = 1.0
    good_steps: int = 0
    dynamic: bool = False

    @classmethod
    def of(cls, dtype: torch.dtype) -> "LossScale":
        return cls(FIRST_SCALE, dynamic=True) if dtype == torch.float16 else cls()

    def accepts(self, finite: bool) -> bool:
        """Records a step. False if its gradient is not finite and a smaller scale cannot help."""
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
        """The state that a checkpoint stores, [2] float64."""
        return torch.tensor([self.value, self.good_steps], dtype=torch.float64)

    def restore(self, state: torch.Tensor) -> None:
        self.value, self.good_steps = float(state[0]), int(state[1])
