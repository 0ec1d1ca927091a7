"""Random models whose responses have log-normal lengths.

In a plain random model each token ends a response with the same probability, so that lengths fall geometrically. Here
tokens have a class, nearly every token is followed by one of its own class, and each class has another number of tokens
that end a response. So a response keeps the class of its first token, and its length is drawn from a mixture of
geometric distributions whose means are quantiles of a log-normal one. Median and spread of the lengths' logarithms are
those asked for; the spread is at least that of a geometric distribution. All of it is in the weights, the same for
every trainer.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import torch

CLASSES = 8
# Mean and standard deviation of the logarithm of a geometric length, less that of its mean.
GEOMETRIC_MEAN, LEAST_SIGMA = -0.5772, math.pi / math.sqrt(6)
# The logit of a token of the own class, beside about 0 of others; and what the last token itself gets besides.
OWN_CLASS, OWN_TOKEN = 14.0, 1.5
LAYERS = 0.001  # what layers add to a token's embedding, as a share of what a random model's would


def end_ids(median: float, sigma: float, first: int, vocabulary: int) -> list[int]:
    """The ids from `first` on that end a response; `median` is in tokens, `sigma` that of the lengths' logarithms."""
    ends: list[int] = []
    spread = math.sqrt(sigma**2 - LEAST_SIGMA**2)
    for number in range(CLASSES):
        of_class = range(first + number, vocabulary, CLASSES)
        mean = median * math.exp(spread * NormalDist().inv_cdf((number + 0.5) / CLASSES) - GEOMETRIC_MEAN)
        count = max(1, round(len(of_class) / mean))
        ends += of_class[:: len(of_class) // count][:count]
    return sorted(ends)


@torch.no_grad()
def give_classes(model: Any, first: int) -> None:
    """Gives the ids from `first` on their classes, in a random model with or without tied embeddings."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    vocabulary, width = embedding.shape
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(LAYERS)
    directions = torch.randint(0, 2, (CLASSES, width), device=embedding.device).mul(2).sub(1) * OWN_CLASS / width
    tokens = torch.randn(vocabulary, width, device=embedding.device) * math.sqrt(OWN_CLASS * OWN_TOKEN) / width
    tokens[first:] += directions[torch.arange(vocabulary - first, device=embedding.device) % CLASSES]
    for weight in _different(embedding, head):
        weight.copy_(tokens)


def _different(*weights: torch.Tensor) -> Sequence[torch.Tensor]:
    return list({weight.data_ptr(): weight for weight in weights}.values())
