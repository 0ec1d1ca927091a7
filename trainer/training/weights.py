"""Weights on their way from the actor to the engines: few large pieces of plain bytes."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BUCKET_BYTES = 512 * 2**20


@dataclass(frozen=True)
class WeightBucket:
    """Some weights end to end, in numpy: Ray shares such arrays between the processes of a node without a copy."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    data: np.ndarray

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by name, as views of `data`: do not write to them."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = math.prod(shape) * self.dtype.itemsize
            # `data` may lie in read-only shared memory, of which torch makes no safe tensor: copy this piece.
            piece = torch.from_numpy(self.data[start : start + size].copy())
            yield name, piece.view(self.dtype).view(shape)
            start += size


def pack(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES) -> Iterator[WeightBucket]:
    """Groups weights of one dtype on CPU into buckets of at most `bucket_bytes`; a larger weight is a bucket alone."""
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if pending and size + tensor.nbytes > bucket_bytes:
            yield _bucket(pending)
            pending, size = [], 0
        pending.append((name, tensor))
        size += tensor.nbytes
    if pending:
        yield _bucket(pending)


def _bucket(weights: list[tuple[str, Tensor]]) -> WeightBucket:
    return WeightBucket(
        names=tuple(name for name, _ in weights),
        shapes=tuple(tuple(tensor.shape) for _, tensor in weights),
        dtype=weights[0][1].dtype,
        data=torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in weights]).numpy(),
    )
