"""Gives a sharded network its weights: each rank reads its slices, or the first rank broadcasts what it alone has read.

The ranks of a node read the same files through the page cache, and none holds more than its shard and one weight.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.errors import DataError
from trainer.models.file_weights import FileWeight


def take_weights(network: nn.Module, device: torch.device) -> Callable[[nn.Module], None]:
    """Takes out of a network what sharding must not touch, and returns what fills the sharded network.

    Parameters in files become empty. If any rank's network is empty (its parameters are on `meta`), the first rank
    keeps its weights for a broadcast. Every rank must call both; the second raises DataError if the ranks have
    different networks or files.
    """
    empty = torch.tensor(int(any(weight.is_meta for weight in network.parameters())))
    dist.all_reduce(empty, dist.ReduceOp.MAX)
    if empty:
        whole = {name: tensor.detach() for name, tensor in _tensors(network)} if dist.get_rank() == 0 else {}
        return partial(_broadcast_from_rank0, whole=whole, device=device)
    if files := _emptied(network):
        return partial(_read_slices, files=files, device=device)
    return lambda _network: None


def _emptied(network: nn.Module) -> dict[str, FileWeight]:
    """The parameters in files by name, each replaced by an empty one under all of its names."""
    files = {name: weight for name, weight in network.named_parameters() if isinstance(weight, FileWeight)}
    empty = {
        id(weight): nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), weight.requires_grad)
        for weight in files.values()
    }
    for module in network.modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(weight) in empty:
                setattr(module, name, empty[id(weight)])
    return files


@torch.no_grad()
def _read_slices(network: nn.Module, files: Mapping[str, FileWeight], device: torch.device) -> None:
    _check_same(
        {
            name: (*weight.shape, weight.dtype, hashlib.sha256(weight.first_bytes()).digest())
            for name, weight in files.items()
        }
    )
    _materialise(network, device)
    parameters = dict(network.named_parameters())
    for name, weight in files.items():
        parameter = parameters[name]
        start, local = [0] * weight.dim(), parameter
        if isinstance(parameter, DTensor):
            local, mesh = parameter.to_local(), parameter.device_mesh
            _, start = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
        weight.read_into(local, start)


@torch.no_grad()
def _broadcast_from_rank0(network: nn.Module, whole: Mapping[str, Tensor], device: torch.device) -> None:
    first = dist.get_rank() == 0
    _materialise(network, device)
    tensors = dict(_tensors(network))
    _check_same({name: (*tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        sent = whole[name].to(device) if first else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(sent, src=0)
        if first:
            continue
        if isinstance(tensor, DTensor):
            share = distribute_tensor(sent, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(share.to_local())
        else:
            tensor.copy_(sent)


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from network.named_parameters()
    yield from network.named_buffers()


def _materialise(network: nn.Module, device: torch.device) -> None:
    """Allocates memory for what is on `meta`, and restores tied weights."""
    names: dict[int, list[str]] = {}
    for name, weight in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    network._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for first, *others in names.values():
        for other in others:
            module, _, attribute = other.rpartition(".")
            setattr(network.get_submodule(module), attribute, network.get_parameter(first))


def _check_same(values: Mapping[str, object]) -> None:
    sent = [dict(values)]
    dist.broadcast_object_list(sent, src=0)
    if different := sorted(name for name in {*values, *sent[0]} if values.get(name) != sent[0].get(name)):
        raise DataError(
            f"rank {dist.get_rank()} built a different network than rank 0; the first difference is {different[0]}",
            hint="give every node the same model files and the same version of Transformers",
        )
