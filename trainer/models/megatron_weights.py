"""Which weights of Transformers' layers make up those of Megatron-Core's, and back; nothing here needs Megatron.

Megatron joins query, key and value projections group by group, a group being a key-value head with its queries, and
gate and up projections share by share: what each rank has of a matrix is then one piece of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LAYER = "megatron"  # what a layer of Megatron's is called within the one whose place it takes
KINDS = ("weight", "bias")


@dataclass(frozen=True)
class Origin:
    """Where a weight of Megatron's comes from.

    It has the rows of `parts` in turns: of `groups` groups each, and of each group as many rows as `shares` say, one
    relative to the other. `split` is the dimension along which ranks share it; None: each has the whole.
    """

    parts: tuple[str, ...]
    split: int | None = None
    groups: int = 1
    shares: tuple[int, ...] = (1,)

    def joined(self, weights: list[Tensor]) -> Tensor:
        """One weight [rows, …] of the parts' weights."""
        if len(weights) == 1:
            return weights[0]
        return torch.cat([weight.unflatten(0, (self.groups, -1)) for weight in weights], dim=1).flatten(0, 1)

    def separated(self, weight: Tensor) -> list[Tensor]:
        """The inverse of `joined`."""
        grouped = weight.unflatten(0, (self.groups, -1))
        unit = grouped.shape[1] // sum(self.shares)
        return [part.flatten(0, 1) for part in grouped.split([share * unit for share in self.shares], dim=1)]


Origins = Mapping[str, Origin]


def origins(config: Any, ranks: int) -> Origins:
    """The modules of Megatron's layer with those of Transformers', for a model's configuration and so many ranks that
    split it."""
    groups = config.num_key_value_heads
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    shares = (config.num_attention_heads // groups, 1, 1)
    return {
        "input_layernorm": Origin(("input_layernorm",)),
        "self_attention.linear_qkv": Origin(projections, split=0, groups=groups, shares=shares),
        "self_attention.q_layernorm": Origin(("self_attn.q_norm",)),
        "self_attention.k_layernorm": Origin(("self_attn.k_norm",)),
        "self_attention.linear_proj": Origin(("self_attn.o_proj",), split=1),
        "pre_mlp_layernorm": Origin(("post_attention_layernorm",)),
        "mlp.linear_fc1": Origin(("mlp.gate_proj", "mlp.up_proj"), split=0, groups=ranks, shares=(1, 1)),
        "mlp.linear_fc2": Origin(("mlp.down_proj",), split=1),
    }


def to_megatron(weights: Mapping[str, Tensor], table: Origins) -> dict[str, tuple[Tensor, int | None]]:
    """Each of Megatron's weights with its split, for the weights of one of Transformers' layers. What has no place in
    Megatron's layer keeps its name."""
    left, found = dict(weights), {}
    for module, origin in table.items():
        for kind in KINDS:
            names = [f"{part}.{kind}" for part in origin.parts]
            if all(name in left for name in names):
                found[f"{module}.{kind}"] = origin.joined([left.pop(name) for name in names]), origin.split
    return found | {name: (weight, None) for name, weight in left.items()}


def to_transformers(name: str, weight: Tensor, table: Origins) -> Iterator[tuple[str, Tensor]]:
    """The whole weights of Transformers that are joined in one of Megatron's; a weight outside its layers stays."""
    layer, found, own = name.partition(f".{LAYER}.")
    if not found:
        yield name, weight
        return
    module, _, kind = own.rpartition(".")
    origin = table[module]
    for part, piece in zip(origin.parts, origin.separated(weight), strict=True):
        yield f"{layer}.{part}.{kind}", piece
