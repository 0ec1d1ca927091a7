"""Expert parallelism: each rank of a group holds some experts of each layer (GShard: Lepikhin et al. 2020,
arXiv:2006.16668).

A token visits the experts that its router chose, wherever they are: all-to-all exchanges bring the tokens to the
experts' ranks and the results back. None is dropped, however unequally the router chooses. The experts compute with
Transformers' own grouped products and gates.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers.integrations.moe import ExpertsInterface, _grouped_linear

from trainer.errors import ConfigError, DataError
from trainer.models.context_parallel import RankGroup

NAME = "parallel"
# A rank computes at once at most this many times as many tokens as the ranks of its group do on average.
MOST_AT_ONCE = 2


class ExpertGroup(RankGroup):
    """The ranks among which each layer's experts are divided, in their order. Every member must call each method."""

    def loads(self, counts: Tensor) -> Tensor:
        """The tokens for each expert: own ones, [experts] -> [rank that has them, rank of the expert, its experts], on
        CPU."""
        of_ranks = counts.new_empty(self.size, len(counts))
        dist.all_gather(list(of_ranks.unbind()), counts, group=self.group)
        return of_ranks.cpu().unflatten(1, (self.size, -1))

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends the first `sent[0]` rows of [rows, width] to rank 0, and so on; returns those of all ranks."""
        result = rows.new_empty(sum(received), *rows.shape[1:])
        # The collective reads memory in its order, whatever the strides.
        dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=self.group)
        return result


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Gradients go back the way that their rows came."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ExpertGroup) -> Tensor:
        ctx.way = received, sent, group
        return group.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        received, sent, group = ctx.way
        return group.exchange(gradient, received, sent), None, None, None


class _Copies(torch.autograd.Function):  # type: ignore[misc]
    """`copies` of each row, in an order; `places` is where each copy, row by row, is in that order.

    torch's own gradient of indexing adds up copies in an order that varies.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(places)
        return rows[order // copies]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        of_copies = gradient[places]
        return of_copies.unflatten(0, (-1, ctx.copies)).sum(1) if ctx.copies > 1 else of_copies, None, None, None


class _WeightedSum(torch.autograd.Function):  # type: ignore[misc]
    """The weighted sum of the results of each token's experts; choices are added up in their order.

    `rows` are in an order of all choices; `places` [tokens, choices] is where in it each choice is.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, weights: Tensor, kernels: "Kernels") -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(rows, order, places, weights)
        return kernels.weighted_sum(rows, places, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, order, places, weights = ctx.saved_tensors
        of_rows = ctx.kernels.weighted_copies(gradient, order, weights)
        return of_rows, None, None, ctx.kernels.products(gradient, rows, places).to(weights.dtype), None


def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """[rows, width] -> [tokens, width]"""
    return (rows[places] * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def weighted_copies(tokens: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """[tokens, width] -> [rows, width]: each row is a token times the weight of its choice."""
    return (tokens[order // weights.shape[1]] * weights.flatten()[order].unsqueeze(-1)).to(tokens.dtype)


def products(tokens: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """The scalar product of each token with each of its rows, [tokens, choices] float32."""
    return (tokens.unsqueeze(1).float() * rows[places].float()).sum(-1)


@dataclass(frozen=True)
class Kernels:
    """What reads each row once if it is compiled, and several times if not."""

    weighted_sum: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_sum
    weighted_copies: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_copies
    products: Callable[[Tensor, Tensor, Tensor], Tensor] = products

    @classmethod
    @cache
    def compiled(cls) -> "Kernels":
        return cls(*(torch.compile(kernel, dynamic=True) for kernel in (weighted_sum, weighted_copies, products)))


class _SharedLoss(torch.autograd.Function):  # type: ignore[misc]
    """Weights whose gradient is divided by the ranks of the group.

    They get the gradient of all members' losses, but FSDP averages theirs over as many ranks fewer as there are
    members. Its own setting for that, `set_gradient_divide_factor`, divides twice on a mesh of a single rank.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


class _OwnExperts:
    """The experts of one rank, with what Transformers' forward pass reads of the module of all."""

    def __init__(self, module: nn.Module, ranks: int) -> None:
        self._module = module
        self._is_expert_parallel = False  # of Transformers' own way, which gives ids to experts elsewhere
        self.num_experts = module.num_experts // ranks
        for name, weight in module.named_parameters(recurse=False):
            setattr(self, name, _SharedLoss.apply(weight.to_local(), ranks))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The results, [rows, width]; `counts` are the rows of each expert, [experts], one expert after the other."""
        if not len(rows):  # grouped kernels need a row; joined with none, so that the backward pass exchanges none
            padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            return self(padded, torch.eye(1, self.num_experts, dtype=counts.dtype, device=counts.device)[0])[:0]
        offsets = counts.cumsum(0, dtype=torch.int32)
        if self.has_gate:
            hidden = self._apply_gate(self._linear("gate_up_proj", rows, counts, offsets))
        else:
            hidden = self.act_fn(self._linear("up_proj", rows, counts, offsets))
        return self._linear("down_proj", hidden, counts, offsets)

    def _linear(self, name: str, rows: Tensor, counts: Tensor, offsets: Tensor) -> Tensor:
        bias = None
        if self.has_bias:
            bias = getattr(self, f"{name}_bias").repeat_interleave(counts, dim=0, output_size=len(rows))
        computed: Tensor = _grouped_linear(rows, getattr(self, name), offsets, bias, self.is_transposed)
        return computed


# Left out of compiled layers: how many rows are exchanged is known only when the router has chosen.
@torch.compiler.disable
def parallel_experts(module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the results of each token's experts. Transformers calls it in each layer; every member of the
    group must call it.

    Args:
        module: the experts, after `split_experts`.
        hidden: [tokens, width]; members may have different numbers of tokens.
        chosen: [tokens, choices], the numbers of each token's experts.
        weights: [tokens, choices].

    Returns:
        [tokens, width]; choices are added up in their order.
    """
    group: ExpertGroup = module.expert_group
    experts, choices = _OwnExperts(module, group.size), chosen.shape[1]
    numbers, by_expert = torch.sort(chosen.flatten(), stable=True)
    starts = torch.searchsorted(numbers, torch.arange(module.num_experts + 1, device=numbers.device))
    loads = group.loads(starts.diff())
    parts = divided(loads, parts_needed(loads))
    order = _part_by_part(by_expert, parts[group.rank])
    places = _places(order)
    rows = _Copies.apply(hidden, order, places, choices)
    results, start = [], 0
    for sent, received in zip(parts[group.rank].unbind(-1), parts[:, group.rank].unbind(-1), strict=True):
        part = rows[start : (start := start + int(sent.sum()))]
        if parts.shape[-1] == 1:
            results.append(_visit(experts, part, sent, received, group))
        else:  # otherwise the backward pass would need the activations of all parts at once
            results.append(checkpoint(_visit, experts, part, sent, received, group, use_reentrant=False))
    result = torch.cat(results) if len(results) > 1 else results[0]
    summed: Tensor = _WeightedSum.apply(result, order, places.view_as(chosen), weights, module.kernels)
    return summed


def _visit(experts: _OwnExperts, rows: Tensor, sent: Tensor, received: Tensor, group: ExpertGroup) -> Tensor:
    """The results of rows [rows, width], which are sorted by expert; `sent` and `received` count them, [rank, experts
    of a rank]."""
    there, here = sent.sum(1).tolist(), received.sum(1).tolist()
    visitors = _Exchange.apply(rows, there, here, group)
    # From one rank after the other to one expert after the other, and back.
    counts = received.to(rows.device, non_blocking=True)
    numbers = torch.arange(experts.num_experts, device=rows.device).repeat(group.size)
    order = numbers.repeat_interleave(counts.flatten(), output_size=len(visitors)).argsort(stable=True)
    places = _places(order)
    by_expert = experts(_Copies.apply(visitors, order, places, 1), counts.sum(0))
    return _Exchange.apply(_Copies.apply(by_expert, places, order, 1), here, there, group)


def _places(order: Tensor) -> Tensor:
    """Where each number is in an order of all of them."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def parts_needed(loads: Tensor) -> int:
    """In how many parts a group computes `loads`, as `ExpertGroup.loads` returns them, so that the memory of its rank
    with the most tokens is bounded."""
    of_ranks = loads.sum(dim=(0, 2))
    return max(1, math.ceil(int(of_ranks.max()) * len(of_ranks) / (MOST_AT_ONCE * max(1, int(of_ranks.sum())))))


def divided(loads: Tensor, parts: int) -> Tensor:
    """Divides the tokens that each rank has for each other one evenly, [from, to, experts] -> [from, to, experts,
    parts]."""
    # Where each part ends among the tokens from one rank for another, [from, to, 1, parts + 1].
    ends = -(-loads.sum(2, keepdim=True).unsqueeze(-1) * torch.arange(parts + 1) // parts)
    # How many tokens of the first experts lie before these ends.
    before = torch.minimum(loads.cumsum(2).unsqueeze(-1), ends)
    return before.diff(dim=2, prepend=torch.zeros_like(before[:, :, :1])).diff(dim=3)


def _part_by_part(by_expert: Tensor, parts: Tensor) -> Tensor:
    """An order that is sorted by expert, sorted by part first; parts: [to, experts, parts] counts."""
    if parts.shape[-1] == 1:
        return by_expert
    numbers = torch.arange(parts.shape[-1]).repeat(parts[..., 0].numel()).repeat_interleave(parts.flatten())
    return by_expert[torch.argsort(numbers, stable=True).to(by_expert.device)]


def expert_modules(network: nn.Module) -> list[nn.Module]:
    """The modules that hold all experts of a layer: those of Transformers' `use_experts_implementation`."""
    return [module for module in network.modules() if hasattr(module, "is_transposed") and hasattr(module, "has_gate")]


def split_experts(decoder: nn.Module, mesh: DeviceMesh, shards: int, compiles: bool = False) -> None:
    """Divides the experts of each layer among the ranks of a mesh, in place; each rank of it shares its own with
    `shards` - 1 ranks of other groups.

    Raises ConfigError if their matrices cannot be divided among these.
    """
    group = ExpertGroup(mesh.get_group())
    decoder.set_experts_implementation(NAME)
    for module in expert_modules(decoder):
        module.expert_group = group
        module.kernels = Kernels.compiled() if compiles else Kernels()
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.shape[1] % shards:
                raise ConfigError(
                    f"sharding.expert_parallel={group.size}: {shards} ranks share the same experts, which does not "
                    f"divide the size {weight.shape[1]} of {name}",
                    hint="set it so that fewer ranks share the same experts, or set sharding.shard_size",
                )
            share = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(share, requires_grad=weight.requires_grad))


def check_expert_parallel(language_model: nn.Module, role: str, ranks: int) -> None:
    """Raises DataError if `ranks` ranks of a role cannot divide a model's experts.

    The weights may be on any device, `meta` included.
    """
    if ranks == 1:
        return
    family, experts = language_model.config.get_text_config().model_type, expert_modules(language_model)
    setting = f"{role}.sharding.expert_parallel={ranks}: {family}"
    if not experts:
        raise DataError(f"{setting} models have no experts that ranks can divide", hint="set it to 1")
    for module in experts:
        number = module.num_experts
        if number % ranks:
            fitting = [str(size) for size in range(1, number + 1) if number % size == 0]
            raise DataError(
                f"{setting} models of this size have {number} experts, which it does not divide",
                hint=f"set it to one of {', '.join(fitting)}",
            )
        for name, weight in module.named_parameters():
            if "." in name or weight.dim() < 2 or len(weight) != number:
                raise DataError(
                    f"{setting} models have a weight that belongs to no single expert: {name} of "
                    f"{type(module).__name__}",
                    hint="set it to 1",
                )


ExpertsInterface.register(NAME, parallel_experts)
