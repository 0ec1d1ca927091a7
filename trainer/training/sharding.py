"""How a network is spread over the ranks and computed: FSDP2, mixed precision, checkpointing, compilation."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.config.sharding import ShardingConfig
from trainer.errors import DataError
from trainer.models.backend import TrainingBackend, training_backend

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


@dataclass(frozen=True)
class Execution:
    """How a rank computes.

    `dtype` is that of activations and gathered weights. `checkpoint_activations` keeps only each layer's input for the
    backward pass, for a third more computing. `compile_layers` fuses what lies between the matrix products, and keeps
    `activation_memory_budget` of what the backward pass needs; what is cheap to compute again goes first.
    `shares_gpu` gives unused memory back after each pass: other processes on the GPU need it in turn. With `backend`
    megatron, Megatron-Core's layers take the place of the model's.
    """

    device: torch.device
    dtype: torch.dtype
    checkpoint_activations: bool = False
    compile_layers: bool = False
    activation_memory_budget: float = 0.9
    shares_gpu: bool = False
    backend: TrainingBackend = field(default_factory=partial(training_backend, "fsdp"))
    sharding: ShardingConfig = field(default_factory=ShardingConfig)


def shard(network: nn.Module, execution: Execution, mesh: DeviceMesh) -> nn.Module:
    """Spreads each layer's weights, and the rest as one group, over the ranks of a mesh from `device_mesh`."""
    layers, split_over = decoder_layers(network.decoder), mesh[TENSOR] if TENSOR in mesh.mesh_dim_names else None
    execution.backend.prepare_layers(layers, network.decoder.config, split_over)
    trained = any(parameter.requires_grad for parameter in network.parameters())
    if execution.checkpoint_activations and trained:
        network.decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        network.train()  # Transformers checkpoints in training mode only
    if execution.device.type == "cuda":
        # What is left in float32, such as gradients of normalisations, may use the matrix units' float32 mode.
        torch.set_float32_matmul_precision("high")
    # Read when a layer is compiled, at its first pass.
    torch._functorch.config.activation_memory_budget = execution.activation_memory_budget
    ranks = mesh[REPLICATE, SHARD] if REPLICATE in mesh.mesh_dim_names else mesh[SHARD]
    policy = MixedPrecisionPolicy(param_dtype=execution.dtype, reduce_dtype=torch.float32)
    # Alone, a rank has nothing to gather: converted weights may stay until the pass is over.
    stays = ranks.size() == 1 or execution.sharding.resharding_interval > 1
    for layer in layers:
        if execution.compile_layers and execution.backend.compiles_layers:
            layer.compile()
        kept = False if stays else execution.sharding.reshard_after_forward
        fully_shard(layer, mesh=ranks, mp_policy=policy, reshard_after_forward=kept)
    return fully_shard(network, mesh=ranks, mp_policy=policy)


def device_mesh(execution: Execution) -> DeviceMesh:
    """The ranks by copies of the weights (REPLICATE), their shares (SHARD) and, next to each other, those that split
    the matrix products (TENSOR); of these dimensions, SHARD and those that have more than one place."""
    sharding, world_size = execution.sharding, dist.get_world_size()
    copy = sharding.shard_size or world_size
    places = {
        REPLICATE: world_size // copy,
        SHARD: copy // sharding.tensor_parallel,
        TENSOR: sharding.tensor_parallel,
    }
    used = {name: size for name, size in places.items() if size > 1 or name == SHARD}
    return init_device_mesh(execution.device.type, tuple(used.values()), mesh_dim_names=tuple(used))


def sharded_modules(network: nn.Module) -> list[FSDPModule]:
    """The units of sharding: each layer, and the outermost for what is left."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Drops gathered weights; FSDP keeps the outermost after a forward pass."""
    for module in modules:
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
