"""Estimates the GPU memory of a forward and backward pass.

The formulas follow what a decoder layer with gated feed-forward keeps for its backward pass. On H200s updates of 1.5B
took 0.95 of the estimate and updates of 0.5B 0.8 (benchmarks/measured/training.md).
"""

from trainer.config.sections.roles import TrainedModelConfig
from trainer.planning.model_size import ModelSize

# A chunk of logits and its gradient; see LOGITS_PER_CHUNK in trainer/models/networks.py.
HEAD_BYTES = 2**29 * 6


def bytes_per_token(size: ModelSize, settings: TrainedModelConfig, type_bytes: int, checkpointing: bool) -> int:
    """Bytes of activations for each token of a micro-batch, on each rank."""
    split = settings.sharding.tensor_parallel
    between = 2 * size.hidden
    inside = (2 * size.intermediate + size.query + 2 * size.key_value) // split
    recomputed = (size.intermediate // split + 2 * size.hidden) if keeps_everything(settings) else 0
    layer = (between + inside + recomputed) * type_bytes
    routed, exchanged = (values * type_bytes for values in _routed_values(size))
    # With checkpointing, layers keep their inputs, and one layer at a time has all its activations again.
    if checkpointing:
        return size.layers * size.hidden * type_bytes + layer + routed + exchanged
    return size.layers * layer + (0 if size.experts is None else size.experts.layers * routed) + exchanged


def _routed_values(size: ModelSize) -> tuple[int, int]:
    """Values for each token that a layer of experts keeps, and those that only the layer at work has. Each expert that
    a token is routed to gets a copy of its hidden state, and keeps what a gated feed-forward does; its result is
    weighted. Copies on their way to the experts and back exist three times."""
    if size.experts is None:
        return 0, 0
    chosen, width = size.experts.chosen, size.experts.width
    return chosen * (2 * size.hidden + 3 * width), 3 * chosen * size.hidden


def keeps_everything(settings: TrainedModelConfig) -> bool:
    """Whether layers also keep activations that are cheap to recompute."""
    return not settings.compile or settings.activation_memory_budget == 1


def gathered_bytes(size: ModelSize, settings: TrainedModelConfig, type_bytes: int, ranks: int) -> int:
    """Bytes of whole weights during a pass: the layers in use, or the network where it stays gathered. And of whole
    gradients, where they add up on each rank before the ranks average them."""
    sharding = settings.sharding
    kept = ranks == 1 or sharding.resharding_interval > 1 or sharding.reshard_after_forward is False
    outside = size.vocabulary * size.hidden + size.head
    layers = size.layers if kept else min(2, size.layers)
    # A rank gathers only its own experts.
    elsewhere = 0 if size.experts is None else size.experts.parameters * (1 - 1 / sharding.expert_parallel)
    matrices = size.matrices - round(elsewhere)
    weights = (layers * matrices // size.layers + outside) * type_bytes + outside * 4
    split = sharding.tensor_parallel
    if sharding.gradient_sync_interval == 1 or ranks <= split or settings.lora.rank:
        return weights
    return weights + (matrices // split + outside) * 4


def pass_bytes(size: ModelSize, settings: TrainedModelConfig, type_bytes: int, ranks: int, tokens: int) -> int:
    """Bytes that an update with micro-batches of `tokens` takes beside weights, gradients and optimizer state."""
    activations = tokens * bytes_per_token(size, settings, type_bytes, settings.activation_checkpointing)
    return gathered_bytes(size, settings, type_bytes, ranks) + HEAD_BYTES + activations
