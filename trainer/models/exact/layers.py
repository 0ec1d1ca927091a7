"""Qwen2's layers from the operators, in place of Transformers' own forward passes; weights stay where they are."""

from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from trainer.models.exact.gradients import Norm, Product, Rope, SiluProduct
from trainer.models.exact.operators import Operators, rope_table
from trainer.models.networks import PolicyNetwork
from trainer.models.packing import ATTENTION_ARGUMENTS

# The same for all layers.
shared_table = cache(rope_table)


def use_operators(network: PolicyNetwork, operators: Operators) -> None:
    """Makes a Qwen2 model compute by the operators, its head included, in place."""
    decoder, network.operators = network.decoder, operators
    for layer in decoder.layers:
        layer.forward = partial(_layer, layer, decoder.config, operators)
    decoder.norm.forward = partial(_norm, decoder.norm, operators)


def _norm(module: nn.Module, operators: Operators, hidden_states: Tensor) -> Tensor:
    normed: Tensor = Norm.apply(hidden_states.flatten(0, -2), module.weight, module.variance_epsilon, operators)
    return normed.view(hidden_states.shape)


def _layer(
    layer: nn.Module, config: Any, operators: Operators, hidden_states: Tensor, *, position_ids: Tensor, **given: Any
) -> Tensor:
    """One layer on a packed line, [1, tokens, width]."""

    def product(module: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = Product.apply(x, module.weight, module.bias, operators)
        return output

    attention, mlp, width = layer.self_attn, layer.mlp, layer.self_attn.head_dim
    base = float(config.rope_parameters["rope_theta"])
    table = shared_table(config.max_position_embeddings, width, base, hidden_states.device, hidden_states.dtype)
    x = _norm(layer.input_layernorm, operators, hidden_states).squeeze(0)
    query, key, value = (product(part, x) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    query, key = Rope.apply(query, key, position_ids.squeeze(0), width, table, operators)
    heads = (part.unflatten(-1, (-1, width)) for part in (query, key, value))
    bounds = {name: given[name] for name in ATTENTION_ARGUMENTS}
    attended = operators.attention(*heads, attention.scaling, **bounds)
    hidden_states = hidden_states + product(attention.o_proj, attended.flatten(1)).unsqueeze(0)
    x = _norm(layer.post_attention_layernorm, operators, hidden_states).squeeze(0)
    activated = SiluProduct.apply(product(mlp.gate_proj, x), product(mlp.up_proj, x))
    return hidden_states + product(mlp.down_proj, activated).unsqueeze(0)  # FSDP2 wants no view
