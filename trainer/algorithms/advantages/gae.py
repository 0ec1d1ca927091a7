"""Generalised advantage estimation, with a critic."""

from __future__ import annotations

from trainer.algorithms.returns import generalized_advantages, whiten
from trainer.algorithms.rows import Advantages, Estimator, Sampled
from trainer.rows import Parameter

GAMMA = Parameter(type=float, default=1.0, description="discount per token", constraints={"gt": 0, "le": 1})


def gae(sampled: Sampled, gamma: float, lam: float, whiten_advantages: bool) -> Advantages:
    """Generalised advantages, whitened if asked, and unwhitened returns. See `generalized_advantages`."""
    assert sampled.values is not None
    advantages, returns = generalized_advantages(sampled.rewards, sampled.values, sampled.mask, gamma, lam)
    return Advantages(whiten(advantages, sampled.mask) if whiten_advantages else advantages, returns)


ROW = Estimator(
    name="gae",
    estimate=gae,
    needs_critic=True,
    parameters={
        "gamma": GAMMA,
        "lam": Parameter(
            type=float,
            default=1.0,
            description="lambda of generalised advantage estimation",
            constraints={"ge": 0, "le": 1},
        ),
        "whiten_advantages": Parameter(
            type=bool,
            default=True,
            description="gae: shift and scale advantages to mean 0 and variance 1 over the batch",
        ),
    },
)
