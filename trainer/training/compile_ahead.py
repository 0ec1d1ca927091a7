"""Compiles a network while its engines start, so that the first step need not.

Each layer computes by itself, with the inputs that it has in a pass over a few rows: beside the engines there may be no
room for the gradients of a whole network.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.models.networks import PolicyNetwork
from trainer.training.engine import TrainingEngine
from trainer.training.micro_batches import LENGTH_MULTIPLE
from trainer.training.ranks.sharding import decoder_layers

# What Inductor takes for a large pass: so many tokens, and so many numbers in their hidden states. It compiles again
# for a pass on the other side of these bounds (MixOrderReduction in torch/_inductor/scheduler.py).
LARGE_TOKENS, LARGE_STATES = 4096, 5 * 2**20
# Tokens whose logits the head computes, few for the sake of memory.
HEAD_TOKENS = 600

# The positional and the named arguments of a layer.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def large_pass(width: int) -> int:
    """Tokens from which on a pass of a network with hidden states of this width counts as large."""
    return max(LARGE_TOKENS, 2 * width, -(-LARGE_STATES // width))


def typical_rows(
    vocabulary: int, prompt: int, response: int, tokens: int, share_prompt: bool, multiple: int = LENGTH_MULTIPLE
) -> Batch:
    """Rows of about so many random tokens in all, with prompts and responses of at most these lengths.

    With `share_prompt` all have one prompt. Only their last tokens count, so that the head has little to compute.
    `multiple` divides the length of a packed line.
    """
    generator = torch.Generator().manual_seed(0)

    def random(length: int) -> list[int]:
        return list(torch.randint(0, vocabulary, (length,), generator=generator).tolist())

    # torch takes equal numbers for one and the same: with and without its prompt, the longest row must not round to the
    # same length.
    longest = response // multiple * multiple or response
    lengths = [max(1, min(longest // 2, longest - prompt)), longest]
    pairs = max(1, -(-tokens // (sum(lengths) + 2 * prompt * (not share_prompt))))
    responses = [random(length) for length in lengths * pairs]
    prompts = [random(prompt)] * len(responses) if share_prompt else [random(prompt) for _ in responses]
    masks = [[False] * (len(row) - 1) + [True] for row in responses]
    return Batch.from_responses(prompts, responses, None, masks)


def compile_ahead(engine: TrainingEngine, rows: Batch) -> None:
    """Compiles what passes over batches like these rows need. Every rank must call it; weights do not change."""
    network, layers = engine.network, decoder_layers(engine.network.decoder)
    with torch.compiler.set_stance("force_eager"), _kept_arguments(layers) as kept:
        engine.forward(rows, MicroBatchLimit(len(rows)))
    trains_input = network.decoder.get_input_embeddings().weight.requires_grad
    with engine.stepping(several=False):
        for number, layer in enumerate(layers):
            (_, *others), named = kept[layer]
            hidden = kept[layers[min(number, 1)]][0][0]
            with torch.no_grad():
                layer(hidden, *others, **named)
            if engine.settings is not None:
                output = layer(hidden.detach().requires_grad_(number > 0 or trains_input), *others, **named)
                output.backward(torch.ones_like(output))
                layer.zero_grad()
            layer.reshard()
        if isinstance(network, PolicyNetwork):
            _compile_head(network, engine)


@contextmanager
def _kept_arguments(layers: nn.ModuleList) -> Iterator[dict[nn.Module, Arguments]]:
    """The arguments of each layer in a forward pass within the block."""
    kept: dict[nn.Module, Arguments] = {}

    def keep(layer: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        # All layers but the first have hidden states of one kind; those of one of them are enough.
        kept[layer] = positional if len(kept) < 2 else (None, *positional[1:]), named

    handles: list[RemovableHandle] = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _compile_head(network: PolicyNetwork, engine: TrainingEngine) -> None:
    matrix = network.language_model.get_output_embeddings()

    def like(weight: Tensor) -> Tensor:
        return torch.zeros(weight.shape, dtype=engine.execution.dtype, device=engine.device)

    weight, bias = like(matrix.weight), None if matrix.bias is None else like(matrix.bias)
    hidden = torch.zeros(HEAD_TOKENS, weight.shape[1], dtype=weight.dtype, device=weight.device)
    targets = torch.zeros(HEAD_TOKENS, dtype=torch.int64, device=weight.device)
    with torch.no_grad():
        network.predict(hidden, weight, bias, targets)
    if engine.settings is not None:
        predicted = network.predict(hidden.requires_grad_(), weight, bias, targets)
        torch.autograd.backward(predicted, [torch.ones_like(values) for values in predicted])
