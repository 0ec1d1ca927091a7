"""Weights on their way from the actor to the engines: few large pieces, checked by their sum.

Between processes that share a GPU a piece stays where it is and its handle travels (CUDA IPC); otherwise its bytes do.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

BUCKET_BYTES = 512 * 2**20
# To add up 16-bit words torch first makes 64-bit ones of them: of so many at a time, in 128 MiB.
WORDS_AT_ONCE = 2**24


@dataclass(frozen=True)
class Layout:
    """Which weights lie in a bucket, end to end in this order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * int(self.dtype.itemsize) for shape in self.shapes)

    def pieces(self, data: Any) -> Iterator[tuple[str, tuple[int, ...], Any]]:
        """Name, shape and bytes of each weight; `data` is the bucket's bytes, a tensor or an array."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = math.prod(shape) * self.dtype.itemsize
            yield name, shape, data[start : start + size]
            start += size


@dataclass(frozen=True)
class WeightBucket:
    """Some weights as bytes in numpy: Ray shares such arrays between the processes of a node without a copy."""

    layout: Layout
    data: np.ndarray
    checksum: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by name."""
        for name, shape, piece in self.layout.pieces(self.data):
            # `data` may lie in read-only shared memory, of which torch makes no safe tensor: copy this piece.
            yield name, torch.from_numpy(piece.copy()).view(self.layout.dtype).view(shape)

    def arrived_sum(self) -> int:
        """The sum of what is here now; another than `checksum` means that something was lost on the way."""
        return checksum([torch.from_numpy(self.data.copy())])


@dataclass(frozen=True)
class SharedBucket:
    """Some weights in the memory of a GPU, for another process on the same GPU."""

    layout: Layout
    handle: tuple[Any, ...]
    checksum: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by name, in the memory of the process that made them: it must keep them until they are copied."""
        data = rebuild_cuda_tensor(*self.handle)
        for name, shape, piece in self.layout.pieces(data):
            yield name, piece.view(self.layout.dtype).view(shape)


def share(bucket: "PackedWeights") -> SharedBucket:
    """What another process on this GPU needs to read the bucket, which must outlive its reading."""
    _, handle = reduce_tensor(bucket.data)
    return SharedBucket(bucket.layout, handle, bucket.checksum)


@dataclass(frozen=True)
class PackedWeights:
    """A bucket as it was packed: bytes on the device of the weights, and their sum there."""

    layout: Layout
    data: Tensor
    total: Tensor

    @property
    def checksum(self) -> int:
        """Waits for the GPU: to ask while others are still to be packed would make it idle in between."""
        return int(self.total)

    def to_numpy(self) -> WeightBucket:
        return WeightBucket(self.layout, self.data.cpu().numpy(), self.checksum)


def pack(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[PackedWeights]:
    """Converts weights and groups them into buckets of at most `bucket_bytes`; a larger weight is a bucket alone."""
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        nbytes = tensor.numel() * dtype.itemsize
        if pending and size + nbytes > bucket_bytes:
            yield _bucket(pending, dtype, size)
            pending, size = [], 0
        pending.append((name, tensor))
        size += nbytes
    if pending:
        yield _bucket(pending, dtype, size)


def checksum(tensors: Sequence[Tensor]) -> int:
    """The sum of all 16-bit words: the same wherever and in whatever order the same weights lie."""
    return int(torch.stack([_word_sum(tensor) for tensor in tensors]).sum())


def _word_sum(tensor: Tensor) -> Tensor:
    parts = [part.sum(dtype=torch.int64) for part in tensor.view(torch.int16).flatten().split(WORDS_AT_ONCE)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _bucket(weights: list[tuple[str, Tensor]], dtype: torch.dtype, size: int) -> PackedWeights:
    layout = Layout(tuple(name for name, _ in weights), tuple(tuple(tensor.shape) for _, tensor in weights), dtype)
    data = torch.empty(size, dtype=torch.uint8, device=weights[0][1].device)
    for (_, shape, piece), (_, tensor) in zip(layout.pieces(data), weights, strict=True):
        piece.view(dtype).view(shape).copy_(tensor)
    return PackedWeights(layout, data, _word_sum(data))
