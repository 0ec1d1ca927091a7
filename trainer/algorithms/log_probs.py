"""Log-probs and entropy of a categorical distribution given by logits."""

from torch import Tensor


def log_probs_and_entropy(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each token and entropy of its distribution, both of softmax(logits / temperature), in float32.

    The engine samples from the tempered distribution and reports its log-probs, so it is this one that the policy ratio
    is about, not the one at temperature 1.

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
