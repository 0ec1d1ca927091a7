"""Tensor parallelism over adjacent ranks (Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053).

Attention heads and MLP columns are split over the ranks. Both end in a product whose partial sums are all-reduced.
Every rank computes everything else in full: embeddings, normalisations and the head.
"""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from trainer.errors import ConfigError

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
# Weights that all heads share. Each rank has the gradient of its own heads only.
OF_EACH_HEAD = (
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "megatron.self_attention.q_layernorm.weight",
    "megatron.self_attention.k_layernorm.weight",
)


def split_layers(layers: nn.ModuleList, config: Any, mesh: DeviceMesh) -> None:
    """Splits layers in place over the ranks of a mesh. `config` is the model's.

    Raises ConfigError if they do not fit.
    """
    check_split(layers, config, mesh.size())
    for layer in layers:
        # Convert an input to a distributed tensor once for all its readers, so their gradients are all-reduced once.
        whole = Replicate()
        plan = {
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
            ),
            "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
            **{name: ColwiseParallel() for name in COLUMNS},
            **{name: RowwiseParallel() for name in ROWS},
        }
        parallelize_module(
            layer, mesh, plan, src_data_rank=None
        )  # every rank has read the same weights, so none are sent


def check_split(layers: nn.ModuleList, config: Any, ranks: int) -> None:
    """Raises ConfigError if these layers cannot be split over `ranks` ranks."""
    known = {*COLUMNS, *ROWS}
    for layer in layers:
        linears = {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        if linears != known:
            raise ConfigError(
                f"sharding.tensor_parallel={ranks}: {type(layer).__name__} cannot be split: its matrices differ from "
                f"{', '.join(sorted(known))} in {', '.join(sorted(linears ^ known))}",
                hint="set it to 1, or use a Qwen2, Qwen3, Llama or Mistral model",
            )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (size := getattr(config, name)) % ranks:
            raise ConfigError(
                f"sharding.tensor_parallel={ranks} does not divide the model's {name}={size}",
                hint="use a number that divides all heads, key-value heads and the MLP's width",
            )


def add_gradients_of_heads(layers: nn.ModuleList, group: dist.ProcessGroup) -> None:
    """All-reduces the gradients of the weights that all heads share. Every rank of the group must call it."""
    for gradient in _gradients_of_heads(layers):
        dist.all_reduce(gradient.to_local(), group=group)


def _gradients_of_heads(layers: nn.ModuleList) -> Iterator[Any]:
    for layer in layers:
        for name, weight in layer.named_parameters():
            if name in OF_EACH_HEAD and weight.grad is not None:
                yield weight.grad
