"""Sharding a network over ranks and preparing its computation: FSDP2, mixed precision, checkpointing, compilation."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from trainer.config.sections.sharding import ShardingConfig
from trainer.errors import DataError
from trainer.models.backend import TrainingBackend, training_backend
from trainer.models.context_parallel import ContextGroup
from trainer.models.experts import expert_modules, split_experts
from trainer.models.networks import is_packed
from trainer.models.routers import routers_and_blocks

REPLICATE, SHARD, TENSOR, CONTEXT = "replicate", "shard", "tensor", "context"
EXPERT_SHARD, EXPERT = "expert_shard", "expert"
# Attributes of layers that drop out themselves, without a module for it (OPT, BioGPT, XGLM).
OWN_DROPOUT = {"dropout", "activation_dropout"}


@dataclass(frozen=True)
class Execution:
    """How a rank computes.

    `dtype` is the type of activations and gathered weights. `checkpoint_activations` keeps only each layer's input for
    the backward pass and costs a third more computation. `compile_layers` fuses the operations between matrix products.
    Compiled layers keep the share `activation_memory_budget` of what the backward pass needs and recompute the rest,
    the cheapest operations first. `shares_gpu` frees cached memory after each pass, for other processes on the GPU.
    `share_prompts` computes a prompt of several rows of a micro-batch once. `backend` provides the layers.
    `float32_routers`: routers compute in float32, with weights that are not rounded to `dtype`.
    """

    device: torch.device
    dtype: torch.dtype
    checkpoint_activations: bool = False
    compile_layers: bool = False
    activation_memory_budget: float = 0.9
    shares_gpu: bool = False
    share_prompts: bool = True
    float32_routers: bool = False
    backend: TrainingBackend = field(default_factory=partial(training_backend, "fsdp"))
    sharding: ShardingConfig = field(default_factory=ShardingConfig)


def shard(network: nn.Module, execution: Execution, mesh: DeviceMesh) -> nn.Module:
    """Shards the network over a mesh from `device_mesh`: each layer is one unit, all other weights are another.

    Experts that ranks divide are units inside their layers, on a mesh from `expert_mesh`; so are routers in float32.
    """
    layers, split_over = decoder_layers(network.decoder), mesh[TENSOR] if TENSOR in mesh.mesh_dim_names else None
    execution.backend.prepare(network, execution.device, split_over)
    trained = any(parameter.requires_grad for parameter in network.parameters())
    if execution.checkpoint_activations and trained:
        network.decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in layers:
            layer.training = True  # Transformers checkpoints only such layers; their parts drop nothing out
            for share in OWN_DROPOUT & vars(layer).keys():
                setattr(layer, share, 0.0)
    if execution.device.type == "cuda":
        # Matrix products that stay in float32 may use TF32.
        torch.set_float32_matmul_precision("high")
    # torch reads this when it compiles a layer, in the first pass.
    torch._functorch.config.activation_memory_budget = execution.activation_memory_budget
    ranks, experts = _sharing(mesh, SHARD), expert_mesh(execution)
    policy = MixedPrecisionPolicy(
        param_dtype=execution.dtype, reduce_dtype=getattr(torch, execution.sharding.gradient_dtype)
    )

    def kept(ranks: DeviceMesh) -> bool | int:
        # A single rank has nothing to gather, so its converted weights may stay until the pass is over.
        stays = ranks.size() == 1 or execution.sharding.resharding_interval > 1
        return False if stays else execution.sharding.reshard_after_forward

    if experts is not None:
        split_experts(network.decoder, experts[EXPERT], experts[EXPERT_SHARD].size(), compiles(network, execution))
        same = _sharing(experts, EXPERT_SHARD)
        for module in expert_modules(network.decoder):
            # Not along the experts, of which a rank may have fewer than ranks share them.
            fully_shard(
                module,
                mesh=same,
                mp_policy=policy,
                reshard_after_forward=kept(same),
                shard_placement_fn=lambda _: Shard(1),
            )
    if execution.float32_routers:
        routing = replace(policy, param_dtype=torch.float32, output_dtype=execution.dtype)
        for router, _ in routers_and_blocks(network.decoder):
            fully_shard(router, mesh=ranks, mp_policy=routing, reshard_after_forward=kept(ranks))
    for layer in layers:
        if compiles(network, execution):
            # Lengths vary from the start; torch would otherwise compile for the first one, and again in a later step.
            layer.compile(dynamic=True)
        fully_shard(layer, mesh=ranks, mp_policy=policy, reshard_after_forward=kept(ranks))
    return fully_shard(network, mesh=ranks, mp_policy=policy)


def _sharing(mesh: DeviceMesh, shard: str) -> DeviceMesh:
    """The ranks that FSDP2 shares weights among: those of copies (REPLICATE) and of their shards."""
    return mesh[REPLICATE, shard] if REPLICATE in mesh.mesh_dim_names else mesh[shard]


def compiles(network: nn.Module, execution: Execution) -> bool:
    """Whether the layers are compiled. Those with a recurrent state loop over tokens: compiling one takes minutes."""
    return execution.compile_layers and execution.backend.compiles_layers and is_packed(network.decoder)


def device_mesh(execution: Execution) -> DeviceMesh:
    """The mesh of all ranks: copies of the weights (REPLICATE), their shards (SHARD), split matrix products (TENSOR).

    Ranks that split matrix products are adjacent. Those of a context group hold shards and copies like any others.
    Dimensions of size 1 are left out, except SHARD.
    """
    sharding, world_size = execution.sharding, dist.get_world_size()
    copy = sharding.shard_size or world_size
    places = {
        REPLICATE: world_size // copy,
        SHARD: copy // sharding.tensor_parallel,
        TENSOR: sharding.tensor_parallel,
    }
    used = {name: size for name, size in places.items() if size > 1 or name == SHARD}
    return init_device_mesh(execution.device.type, tuple(used.values()), mesh_dim_names=tuple(used))


def expert_mesh(execution: Execution) -> DeviceMesh | None:
    """The mesh of all ranks for the weights of experts: copies (REPLICATE), shards of the same experts (EXPERT_SHARD),
    different experts (EXPERT); None if no ranks divide the experts.

    Ranks with different experts are adjacent. REPLICATE of size 1 is left out.
    """
    sharding, world_size = execution.sharding, dist.get_world_size()
    if sharding.expert_parallel == 1:
        return None
    copy = sharding.shard_size or world_size
    sizes = {EXPERT_SHARD: copy // sharding.expert_parallel, EXPERT: sharding.expert_parallel}
    if copy < world_size:
        sizes = {REPLICATE: world_size // copy, **sizes}
    return init_device_mesh(execution.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def context_group(execution: Execution) -> ContextGroup | None:
    """The neighbours that compute other tokens of the same rows; None if a rank computes whole rows.

    With split matrix products, they are the ranks of the data group that hold the same parts of the matrices.
    """
    context, split = execution.sharding.context_parallel, execution.sharding.tensor_parallel
    if context == 1:
        return None
    sizes = (dist.get_world_size() // (context * split), context, split)
    mesh = init_device_mesh(execution.device.type, sizes, mesh_dim_names=("data", CONTEXT, TENSOR))
    return ContextGroup(mesh[CONTEXT].get_group())


def sharded_modules(network: nn.Module) -> list[FSDPModule]:
    """The sharding units, outer ones first: the whole network, and inside it each layer and divided experts."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Frees gathered weights. FSDP keeps those of the outermost unit after a forward pass."""
    for module in modules:
        module.reshard()


def gathered_by_unit(
    module: nn.Module, named: Iterable[tuple[str, Tensor]], units: Iterable[FSDPModule]
) -> Iterator[tuple[str, Tensor]]:
    """The named parameters of a part of the network, those of `units` gathered and in the type of the computation.

    FSDP gathers neighbouring weights of a unit in one collective. What other ranks hold by tensor or expert parallelism
    stays there. Every rank must exhaust it.
    """
    # Inner units come later: a weight belongs to the innermost.
    unit_of = {id(weight): unit for unit in units for weight in unit.parameters()}
    for unit, group in itertools.groupby(named, key=lambda pair: unit_of.get(id(pair[1]))):
        if unit is None:
            yield from group
            continue
        names = [name for name, _ in group]
        unit.unshard()
        # Copies, because FSDP frees its own memory at once.
        whole = [(name, module.get_parameter(name).clone()) for name in names]
        unit.reshard()
        yield from whole


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """The list of transformer layers. Raises DataError if the model has none."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise DataError(
            f"{type(decoder).__name__} has no list of layers to shard",
            hint="use a decoder-only model such as Qwen2, Llama or Mistral",
        )
    return layers
