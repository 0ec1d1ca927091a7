"""Whether a mixture's ranks should gather its experts or divide them: the bytes that each receives in an update.

FSDP gathers all experts twice for each micro-batch and averages their gradients, however few its tokens. Ranks that
divide the experts send each token to those that it is routed to, and back, in both passes.
"""

from collections.abc import Iterator

from trainer.config.sections.roles import TrainedModelConfig
from trainer.planning.model_size import Experts, ModelSize

# Gathering overlaps with computation, the exchange of tokens does not: it must save this factor.
WORTH = 2.0


def sizes_that_fit(experts: Experts, size: ModelSize, ranks: int, copy: int, on_node: int) -> Iterator[int]:
    """Numbers of ranks that can divide the experts: neighbours on a node of `on_node` ranks, with equally many experts
    each, whose widths the other ranks of a copy of the weights can shard."""
    for parts in range(2, min(on_node, experts.number) + 1):
        others = max(1, copy // parts)
        divides = not (ranks % parts or on_node % parts or copy % parts or experts.number % parts)
        if divides and not (size.hidden % others or experts.width % others):
            yield parts


def received_bytes(size: ModelSize, settings: TrainedModelConfig, type_bytes: int, ranks: int, tokens: int) -> float:
    """Bytes of experts, their gradients and tokens on their way that a rank receives for a micro-batch of `tokens`."""
    sharding, experts = settings.sharding, size.experts
    assert experts is not None
    parts, copy = sharding.expert_parallel, sharding.shard_size or ranks
    shards, held = max(1, copy // parts), experts.parameters / parts
    gathered = 2 * held * type_bytes * (1 - 1 / shards) / sharding.resharding_interval
    trained = 0 if settings.lora.rank else {"float32": 4, "bfloat16": 2}[sharding.gradient_dtype]
    averaged = held * trained * (1 - parts / ranks) / sharding.gradient_sync_interval
    # There and back, in the forward and the backward pass, and once more if activations are computed again.
    passes = 6 if settings.activation_checkpointing else 4
    token = passes * experts.chosen * size.hidden * type_bytes * experts.layers
    return gathered + averaged + tokens * token * (1 - 1 / parts)
