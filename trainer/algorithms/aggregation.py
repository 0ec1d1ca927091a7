"""From a loss per token to one number."""

from torch import Tensor


def token_mean(values: Tensor, mask: Tensor, token_count: int) -> Tensor:
    """Sum of the unmasked values over `token_count`, the unmasked tokens of the *global* mini-batch.

    The results of any split of a mini-batch over ranks and micro-batches then add up to the same mean. Dividing each
    part by its own count would weigh the tokens of short responses more (Yu et al. 2025, arXiv:2503.14476, 3.3).

    Args:
        values: [rows, tokens] float.
        mask: [rows, tokens] bool.
    """
    return values.where(mask, 0.0).sum() / token_count
