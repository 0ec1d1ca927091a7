"""Broadcasts the weights that only the first rank has read.

A node then holds one whole model in memory instead of one per rank, and the disk is read once.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.errors import DataError


def some_rank_is_empty(network: nn.Module) -> bool:
    """Whether any rank's network has no weights yet (its parameters are on `meta`). Every rank must call it."""
    empty = torch.tensor(int(any(weight.is_meta for weight in network.parameters())))
    dist.all_reduce(empty, dist.ReduceOp.MAX)
    return bool(empty)


def whole_tensors(network: nn.Module) -> dict[str, Tensor]:
    """The first rank's weights and buffers by name, taken before sharding; empty on other ranks."""
    return {name: tensor.detach() for name, tensor in _tensors(network)} if dist.get_rank() == 0 else {}


@torch.no_grad()
def broadcast_from_rank0(network: nn.Module, whole: Mapping[str, Tensor], device: torch.device) -> None:
    """Fills a sharded network with the first rank's `whole_tensors`. Every rank must call it.

    Raises DataError if the ranks built different networks.
    """
    first = dist.get_rank() == 0
    if not first:
        _materialise(network, device)
    tensors = dict(_tensors(network))
    _check_same({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
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
    """Allocates memory for a network on `meta` and restores its tied weights."""
    names: dict[int, list[str]] = {}
    for name, weight in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    network.to_empty(device=device)
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
