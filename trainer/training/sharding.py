"""How a network is spread over the ranks and computed: FSDP2, mixed precision, checkpointing, compilation."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.errors import DataError
from trainer.sharding_settings import ShardingConfig


@dataclass(frozen=True)
class Execution:
    """How a rank computes.

    `dtype` is that of activations and gathered weights. `checkpoint_activations` keeps only each layer's input for the
    backward pass, for a third more computing. `compile_layers` fuses what lies between the matrix products.
    `shares_gpu` gives unused memory back after each pass: other processes on the GPU need it in turn.
    """

    device: torch.device
    dtype: torch.dtype
    checkpoint_activations: bool = False
    compile_layers: bool = False
    shares_gpu: bool = False
    sharding: ShardingConfig = field(default_factory=ShardingConfig)


def shard(network: nn.Module, execution: Execution) -> nn.Module:
    """Spreads each layer's weights, and the rest as one group, over the ranks."""
    trained = any(parameter.requires_grad for parameter in network.parameters())
    if execution.checkpoint_activations and trained:
        network.decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        network.train()  # Transformers checkpoints in training mode only
    if execution.device.type == "cuda":
        # What is left in float32, such as gradients of normalisations, may use the matrix units' float32 mode.
        torch.set_float32_matmul_precision("high")
    mesh = device_mesh(execution)
    policy = MixedPrecisionPolicy(param_dtype=execution.dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(network.decoder):
        if execution.compile_layers:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards_after_forward(execution))
    return fully_shard(network, mesh=mesh, mp_policy=policy)


def device_mesh(execution: Execution) -> DeviceMesh:
    """The ranks as a line that shares the weights, or as copies of the weights by neighbours that share one."""
    ranks, kind = dist.get_world_size(), execution.device.type
    size = execution.sharding.shard_size or ranks
    if size == ranks:
        return init_device_mesh(kind, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (ranks // size, size), mesh_dim_names=("replicate", "shard"))


def reshards_after_forward(execution: Execution) -> bool | int:
    """FSDP's argument: whether layers drop gathered weights, or over how many ranks they then keep them."""
    alone = dist.get_world_size() == 1  # nothing to gather: converted weights may stay until the pass is over
    stays = alone or execution.sharding.resharding_interval > 1
    return False if stays else execution.sharding.reshard_after_forward


def reshard(network: nn.Module) -> None:
    """Drops gathered weights, those of each layer and the outermost, which FSDP keeps after a forward pass."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """The list of transformer layers, the units of sharding. Raises DataError for a model without one."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise DataError(
            f"{type(decoder).__name__} has no list of layers to shard",
            hint="use a decoder-only model such as Qwen2, Llama or Mistral",
        )
    return layers
