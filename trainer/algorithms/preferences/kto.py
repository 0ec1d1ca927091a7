"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306) as a policy gradient.

Each row is a response with a label, desirable or undesirable. The KL between policy and reference is estimated from
mismatched rows: the prompts of a batch, each with the response to another prompt.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from trainer.algorithms.preferences.dpo import log_ratios, response_advantages
from trainer.algorithms.rows import Labelled

T = TypeVar("T")


def mismatched(responses: Sequence[T]) -> list[T]:
    """The responses in the order in which each prompt gets that of the row before it; the first one the last."""
    return [*responses[-1:], *responses[:-1]]


def estimated_kl(log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor) -> float:
    """The mean log-ratio of mismatched rows, at least 0. All arguments [rows, tokens]."""
    return max(0.0, float(log_ratios(log_probs, reference_log_probs, mask).mean()))


def unpaired_advantages(responses: Labelled, mask: Tensor, loss: Callable[[Labelled], Tensor]) -> tuple[Tensor, Tensor]:
    """Advantages under which one policy gradient step is a step on a loss of responses; and each one's loss, [rows].

    Args:
        responses: computed with the weights before the step.
        mask: [rows, tokens] bool.

    Returns:
        [rows, tokens], 0 where masked; and [rows].
    """
    return response_advantages(
        responses.ratios, mask, lambda ratios: loss(Labelled(ratios, responses.desirable, responses.kl))
    )
