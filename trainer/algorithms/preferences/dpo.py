"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) as a policy gradient.

Rows come in pairs. Row 2i is the chosen response to a prompt, row 2i + 1 the rejected response to the same prompt.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.algorithms.rows import Pairs


def preference_pairs(log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor) -> Pairs:
    """The pairs of a batch.

    Args:
        log_probs, reference_log_probs: [rows, tokens] float.
        mask: [rows, tokens] bool.
    """
    return _pairs(log_ratios(log_probs, reference_log_probs, mask), mask.sum(dim=1))


def log_ratios(log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor) -> Tensor:
    """The log-prob of each response under the policy less that under the reference, [rows]."""
    return (log_probs - reference_log_probs).where(mask, 0.0).sum(dim=1)


def _pairs(ratios: Tensor, lengths: Tensor) -> Pairs:
    return Pairs(ratios[0::2], ratios[1::2], lengths[0::2], lengths[1::2])


def preference_advantages(pairs: Pairs, mask: Tensor, loss: Callable[[Pairs], Tensor]) -> tuple[Tensor, Tensor]:
    """Advantages under which one policy gradient step is a step on a loss of pairs; and the loss of each pair, [pairs].

    Args:
        pairs: computed with the weights before the step.
        mask: [rows, tokens] bool.

    Returns:
        [rows, tokens], 0 where masked; and [pairs].
    """
    ratios = torch.stack([pairs.chosen, pairs.rejected], dim=1).flatten()
    lengths = torch.stack([pairs.chosen_lengths, pairs.rejected_lengths], dim=1).flatten()
    return response_advantages(ratios, mask, lambda of_responses: loss(_pairs(of_responses, lengths)))


def response_advantages(ratios: Tensor, mask: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Advantages under which one policy gradient step is a step on the mean of losses of `log_ratios`; and the losses.

    A loss depends on each response through its log-prob, which is a sum over tokens. So the gradient of the mean loss
    is that of a policy loss whose advantage at every token of a response is minus the derivative of the mean by that
    response's log-prob. `seq-mean-token-sum` averages over rows, hence the factor of the number of rows. With
    advantages, rows are independent of each other, so any rank can process any row.

    Args:
        ratios: [rows]; mask: [rows, tokens] bool.

    Returns:
        [rows, tokens], 0 where masked; and what `loss` returns.
    """
    ratios = ratios.detach().requires_grad_()
    with torch.enable_grad():
        losses = loss(ratios)
        (gradient,) = torch.autograd.grad(losses.mean(), ratios)
    advantages = -len(ratios) * gradient
    return advantages.unsqueeze(1).expand(mask.shape).where(mask, 0.0), losses.detach()
