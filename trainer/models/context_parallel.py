"""Context parallelism: several ranks compute the same rows together (DeepSpeed Ulysses: Jacobs et al. 2023,
arXiv:2309.14509).

Each member of a group computes its share of a packed line's tokens. For attention the members exchange these for a
share of the heads: each then sees the whole line, so that every kind of attention computes as it does without a group.
What they predict is added up at the end, so that every member returns the numbers of all rows.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RankGroup:
    """Neighbouring ranks that share the work of a layer."""

    # No dataclass: FSDP2 would hand each layer a copy of it, as it does with tensors' containers.
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @property
    def rank(self) -> int:
        return int(dist.get_rank(self.group))

    @property
    def size(self) -> int:
        return int(dist.get_world_size(self.group))


class ContextGroup(RankGroup):
    """The ranks that compute the same rows, and what they exchange. Every member must call each method.

    Members have strided shares of a line: token i belongs to member i % size. Response tokens lie together, so every
    member computes as many of their logits as the others, which shares of adjacent tokens would not do. The price is
    one more copy of what is exchanged.
    """

    def repeated(self, tensor: Tensor) -> Tensor:
        """Key-value heads, [1, heads, ...], repeated until they can be divided: each query head keeps its own."""
        heads = tensor.shape[1]
        copies = math.lcm(heads, self.size) // heads
        return tensor if copies == 1 else tensor.repeat_interleave(copies, dim=1)

    def heads_of_line(self, tensor: Tensor) -> Tensor:
        """Exchanges all heads of the own tokens for the own heads of all tokens.

        tensor: [1, heads, tokens / size, width] -> [1, heads / size, tokens, width].
        """
        # [member that gets the heads, tokens / size, heads / size, width]
        parts = tensor.squeeze(0).unflatten(0, (self.size, -1)).transpose(1, 2)
        parts = _Exchange.apply(parts, self)  # [member that had the tokens, ...]
        return parts.transpose(0, 1).flatten(0, 1).transpose(0, 1).unsqueeze(0)

    def tokens_of_rank(self, tensor: Tensor) -> Tensor:
        """Exchanges back: [1, tokens, heads / size, width] -> [1, tokens / size, heads, width]."""
        parts = tensor.squeeze(0).unflatten(0, (-1, self.size)).transpose(0, 1)
        parts = _Exchange.apply(parts, self)  # [member that had the heads, tokens / size, heads / size, width]
        return parts.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def own_heads(self, tensor: Tensor) -> Tensor:
        """The own share of what each query head has, [heads] -> [heads / size]."""
        return tensor.unflatten(0, (self.size, -1))[self.rank]

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the members, of which at most one has a number other than 0 in each place: no rounding.

        All members compute the same loss from it. Each takes the gradient of its own numbers only, so that the sum of
        the members' gradients is the gradient of that one loss.
        """
        total: Tensor = _Total.apply(tensor, self)
        return total

    def whole_line(self, share: Tensor) -> Tensor:
        """What all tokens of the line have, [tokens, ...], from the members' [tokens / size, ...]; no gradient."""
        shares = [torch.empty_like(share, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(shares, share.contiguous(), group=self.group)
        return torch.stack(shares, dim=1).flatten(0, 1)

    def exchange(self, parts: Tensor) -> Tensor:
        """Part i of [size, ...] goes to member i; returns the parts from all members in their order."""
        parts = parts.contiguous()  # the collective reads memory in its order, whatever the strides
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return received

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of the members' tensors."""
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return total


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """The exchange is its own reverse, in the backward pass too."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        return context.exchange(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.context.exchange(gradient), None


class _Total(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: ContextGroup) -> Tensor:  # noqa: ARG004 - autograd's signature
        return context.add_up(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradient, None
