"""Log-probs and entropy of a categorical distribution given by logits."""

from torch import Tensor


def log_probs_and_entropy(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each token and entropy of its distribution, softmax(logits / temperature).

    The engine samples from the tempered distribution and returns its log-probs, so policy ratios must use the same
    temperature.

    Args:
        logits: [tokens, vocabulary] of any float type.
        token_ids: [tokens] int64.

    Returns:
        log_probs, entropy: [tokens] float32.
    """
    logits = logits.float() / temperature
    log_normaliser = logits.logsumexp(dim=-1)
    log_probs = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - log_normaliser
    entropy = log_normaliser - (logits.softmax(dim=-1) * logits).sum(dim=-1)
    return log_probs, entropy
