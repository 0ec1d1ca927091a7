"""Norm and scaling of sharded gradients."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[DTensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def global_norm(gradients: Iterable[DTensor]) -> float:
    """The L2 norm of all gradients over all ranks, on any number of meshes. Every rank must call it."""
    by_mesh: dict[object, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_mesh[gradient.device_mesh].append(gradient)
    norms = [nn.utils.get_total_norm(own).full_tensor() for own in by_mesh.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


@torch.no_grad()
def scale(gradients: Iterable[DTensor], factor: float) -> None:
    """Multiplies all gradients by a factor in place."""
    if local := [gradient.to_local() for gradient in gradients]:
        torch._foreach_mul_(local, factor)
