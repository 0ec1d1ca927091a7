"""Maps weights of Transformers' layers to Megatron-Core's and back, without importing Megatron.

Megatron joins the query, key and value projections group by group (a group is a key-value head with its query heads),
and the gate and up projections rank by rank. So each rank's part of a joined matrix is one contiguous piece.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LAYER = "megatron"  # attribute name of the Megatron layer inside the layer that replaces Transformers'
KINDS = ("weight", "bias")


@dataclass(frozen=True)
class Origin:
    """The Transformers weights that one Megatron weight is joined from.

    Rows of `parts` alternate in `groups` groups; within a group the number of rows is proportional to `shares`.
    `split` is the dimension along which ranks split the weight; None: every rank has all of it.
    """

    parts: tuple[str, ...]
    split: int | None = None
    groups: int = 1
    shares: tuple[int, ...] = (1,)

    def joined(self, weights: list[Tensor]) -> Tensor:
        """Joins the weights of the parts into one weight [rows, …]."""
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
    """The origin of each module in a Megatron layer, for a model's configuration split over `ranks` ranks."""
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
    """Converts the weights of one Transformers layer to (Megatron weight, split dimension) by Megatron's names.

    A weight without a counterpart keeps its name.
    """
    left, fused = dict(weights), {}
    for module, origin in table.items():
        for kind in KINDS:
            names = [f"{part}.{kind}" for part in origin.parts]
            if all(name in left for name in names):
                fused[f"{module}.{kind}"] = origin.joined([left.pop(name) for name in names]), origin.split
    return fused | {name: (weight, None) for name, weight in left.items()}


def to_transformers(name: str, weight: Tensor, table: Origins) -> Iterator[tuple[str, Tensor]]:
    """Separates a whole Megatron weight into Transformers' weights. A weight outside Megatron's layers is unchanged."""
    layer, separator, parameter = name.partition(f".{LAYER}.")
    if not separator:
        yield name, weight
        return
    module, _, kind = parameter.rpartition(".")
    origin = table[module]
    for part, piece in zip(origin.parts, origin.separated(weight), strict=True):
        yield f"{layer}.{part}.{kind}", piece
