"""Floating-point operations that a pass over some rows needs: the numerator of model FLOPs utilisation (MFU).

Only needed work counts. What activation checkpointing, chunks of logits or a second copy of a shared prompt compute
again does not, so MFU is comparable between settings.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.data.batches.shared_prompts import SharedPrompts
from trainer.planning.model_size import ModelSize

# Parameters that the sizes may leave unexplained, as a share: biases and norms are few. A recurrent layer or another
# kind of MLP has more or fewer, and its operations are unknown.
UNEXPLAINED = 0.05


@dataclass(frozen=True)
class Rows:
    """What a pass computes of some rows: the tokens of each, those for which it needs the output head, and the lengths
    of prompts that are not computed again because they are shared with an earlier row."""

    lengths: Sequence[int]
    head_tokens: int
    shared: Sequence[int] = ()

    @classmethod
    def of(
        cls, prompts: SharedPrompts, head_tokens: int, share_prompts: bool, mini_batch_size: int | None = None
    ) -> "Rows":
        """The rows of a batch. Rows share a prompt within a mini-batch only: between two the weights change."""
        shared: list[int] = []
        for group in prompts.groups if share_prompts else []:
            parts = {row // (mini_batch_size or len(prompts.lengths)) for row in group}
            shared += [prompts.prompt_lengths[group[0]]] * (len(group) - len(parts))
        return cls(prompts.lengths, head_tokens, shared)


def forward_flops(size: ModelSize, rows: Rows) -> float:
    """Operations of a forward pass: matrix products of the layers, of the experts only those that a token is routed to;
    causal attention, and the output head."""
    return _layer_products(size, rows) + _attention(size, rows) + _head(size, rows)


def update_flops(size: ModelSize, rows: Rows, frozen: bool = False) -> float:
    """Operations of a forward and a backward pass, which takes twice as many: gradients of inputs and of weights.

    The weights of matrix products that are `frozen` (below adapters) need no gradient; the adapters' own products are
    too few to count.
    """
    return (2 if frozen else 3) * (_layer_products(size, rows) + _head(size, rows)) + 3 * _attention(size, rows)


def _layer_products(size: ModelSize, rows: Rows) -> float:
    unused = 0 if size.experts is None else size.experts.unused
    return 2.0 * (size.matrices - unused) * (sum(rows.lengths) - sum(rows.shared))


def _attention(size: ModelSize, rows: Rows) -> float:
    """A pair of a token and one that it sees costs two operations per channel for its score, and two for its value."""

    def pairs(window: int | None) -> int:
        return seen(rows.lengths, window) - seen(rows.shared, window)

    whole, limited = size.layers - size.windowed_layers, size.windowed_layers
    widths = size.query + (size.value or size.query)
    return 2.0 * widths * (whole * pairs(None) + (limited * pairs(size.window) if limited else 0))


def _head(size: ModelSize, rows: Rows) -> float:
    return 2.0 * size.hidden * size.vocabulary * rows.head_tokens


def seen(lengths: Iterable[int], window: int | None) -> int:
    """Pairs of a token and a token that it sees, itself included; with a window, at most that many for each token."""
    total = 0
    for length in lengths:
        near = length if window is None else min(length, window)
        total += near * (near + 1) // 2 + near * (length - near)
    return total


def explains_parameters(size: ModelSize) -> bool:
    """Whether the sizes account for the parameters in the model's files, so that its operations are known."""
    explained = size.matrices + size.vocabulary * size.hidden + size.head
    return abs(size.parameters - explained) <= UNEXPLAINED * size.parameters
