"""Random models whose responses have lengths of a given distribution, ended by a single token as those of real models.

In a plain random model a rare token ends a response hardly ever. Here tokens have a class, nearly every token is
followed by one of its own class, and after each class the end token has another probability. So a response keeps the
class of its first token, and its length is geometric. With one mean for all classes, lengths are geometric; with
quantiles of a log-normal distribution as means, median and spread of the lengths' logarithms are those asked for. All
of it is in the weights, the same for every trainer.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import torch

CLASSES = 8
# Mean and standard deviation of the logarithm of a geometric length, less that of its mean.
GEOMETRIC_MEAN, LEAST_SIGMA = -0.5772, math.pi / math.sqrt(6)
# The logit of a token of the same class, beside about 0 of others; and what the last token itself gets besides.
SAME_CLASS, SAME_TOKEN = 14.0, 1.5
LAYERS = 0.001  # what layers add to a token's embedding, as a share of what a random model's would


def geometric(mean: float) -> list[float]:
    """The mean length after each class, in tokens."""
    return [mean] * CLASSES


def log_normal(median: float, sigma: float) -> list[float]:
    """The mean length after each class; `median` is in tokens, `sigma` that of the lengths' logarithms, at least
    `LEAST_SIGMA`."""
    spread = math.sqrt(sigma**2 - LEAST_SIGMA**2)
    quantiles = (NormalDist().inv_cdf((number + 0.5) / CLASSES) for number in range(CLASSES))
    return [median * math.exp(spread * quantile - GEOMETRIC_MEAN) for quantile in quantiles]


@torch.no_grad()
def give_lengths(model: Any, means: Sequence[float], end: int) -> None:
    """Gives the ids after `end` their classes, and `end` its probabilities, in a random model with or without tied
    embeddings. Every mean is above 1."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    vocabulary, width = embedding.shape
    first, device = end + 1, embedding.device
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
            weight.mul_(LAYERS)
    directions = torch.randint(0, 2, (CLASSES, width), device=device).mul(2).sub(1) * SAME_CLASS / width
    tokens = torch.randn(vocabulary, width, device=device) * math.sqrt(SAME_CLASS * SAME_TOKEN) / width
    classes = torch.arange(vocabulary - first, device=device) % CLASSES
    tokens[first:] += directions[classes]
    tokens[end] = 0
    # The head sees an embedding of unit mean square, because the layers add next to nothing.
    hidden = tokens[first:] * tokens[first:].square().mean(1, keepdim=True).rsqrt()
    centers = torch.stack([hidden[classes == number].mean(0) for number in range(CLASSES)])
    others = torch.stack(
        [(hidden[classes == number][:256] @ tokens.T).logsumexp(1).mean() for number in range(CLASSES)]
    )
    logits = others - torch.tensor([math.log(mean - 1) for mean in means], device=device)
    tokens[end] = torch.linalg.pinv(centers) @ logits  # the smallest row that gives each class its logit
    for weight in {weight.data_ptr(): weight for weight in (embedding, head)}.values():
        weight.copy_(tokens)
