"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290).

Rows come in pairs. Row 2i is the chosen response to a prompt, row 2i + 1 the rejected response to the same prompt.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid


def preference_margins(log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Implicit reward of the chosen response minus that of the rejected response (the argument of equation 7).

        m = beta ((log p(chosen) - log q(chosen)) - (log p(rejected) - log q(rejected)))

    Args:
        log_probs, reference_log_probs: [rows, tokens] float.
        mask: [rows, tokens] bool.

    Returns:
        [pairs].
    """
    ratios = (log_probs - reference_log_probs).where(mask, 0.0).sum(dim=1)
    return beta * (ratios[0::2] - ratios[1::2])


def dpo_loss(margins: Tensor, label_smoothing: float) -> Tensor:
    """Conservative DPO loss of each pair (Mitchell 2023, "A note on DPO with noisy preferences").

        loss = -(1 - s) log sigmoid(m) - s log sigmoid(-m)

    Args:
        margins: [pairs], from `preference_margins`.
        label_smoothing: s, the assumed share of wrong labels.

    Returns:
        [pairs].
    """
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)


def dpo_advantages(margins: Tensor, mask: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Advantages under which one policy gradient step is a step of DPO.

    The gradient of `dpo_loss`, averaged over the pairs, is equation 8's

        -mean over pairs of w (grad log p(chosen) - grad log p(rejected)),    w = beta (sigmoid(-m) - s)

    and log p is a sum over tokens. A policy loss therefore needs only the advantage +w at every token of the chosen
    response and -w at every token of the rejected one. `seq-mean-token-sum` averages over rows, and there are two rows
    per pair, hence the factor 2. With advantages, rows are independent of each other, so any rank can process any row.

    Args:
        margins: [pairs], computed with the weights before the step.
        mask: [rows, tokens] bool.

    Returns:
        [rows, tokens], 0 where masked.
    """
    weights = 2 * beta * ((-margins).sigmoid() - label_smoothing)
    advantages = weights.repeat_interleave(2)
    advantages[1::2] *= -1
    return advantages.unsqueeze(1).expand(mask.shape).where(mask, 0.0)
