"""Weights on their way from the actor to the engines: few large pieces, checked by their sums.

Between processes that share a GPU a piece stays where it is and its handle travels (CUDA IPC); otherwise its bytes do.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

BUCKET_BYTES = 512 * 2**20
# The sum of a bucket is of 64-bit words, which torch adds up as they lie there; it wraps around.
WORD_BYTES = 8
# To add up shorter ones torch first makes 64-bit ones of them: of so many at a time, in 128 MiB.
SHORT_WORDS_AT_ONCE = 2**24


@dataclass(frozen=True)
class Layout:
    """Which weights lie in a bucket, in this order, each from a whole word on; a last word is for the sum of all."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the weights alone."""
        return sum(math.prod(shape) for shape in self.shapes) * int(self.dtype.itemsize)

    @property
    def size(self) -> int:
        """Of the bucket, in bytes."""
        return sum(self._lengths()) * int(self.dtype.itemsize) + WORD_BYTES

    def tensors(self, data: Tensor) -> list[Tensor]:
        """The weights in a bucket's bytes, whose memory they share."""
        pieces = data[:-WORD_BYTES].view(self.dtype).split(self._lengths())
        return [piece[: math.prod(shape)].view(shape) for shape, piece in zip(self.shapes, pieces, strict=True)]

    def _lengths(self) -> list[int]:
        """How many elements each weight takes, up to the next word."""
        word = WORD_BYTES // self.dtype.itemsize
        return [-(-math.prod(shape) // word) * word for shape in self.shapes]


@dataclass(frozen=True)
class Bucket:
    """Some weights as bytes, after which comes the sum that they had when they were packed."""

    layout: Layout
    data: Tensor

    def open(self) -> "Bucket":
        return self

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by name; they share memory with the bucket."""
        return zip(self.layout.names, self.layout.tensors(self.data), strict=True)

    @property
    def packed_sum(self) -> Tensor:
        """The sum of all words when they were packed; on the bucket's device, as the next."""
        return self.data[-WORD_BYTES:].view(torch.int64)[0]

    @property
    def sum(self) -> Tensor:
        """The sum of all words now; another than before means that something was lost on the way."""
        return self.data[:-WORD_BYTES].view(torch.int64).sum()


class SentBucket(Protocol):
    """What travels: `open` gives the bucket, in this process."""

    def open(self) -> Bucket: ...


@dataclass(frozen=True)
class StoredBucket:
    """A bucket in numpy: Ray shares such arrays between the processes of a node without a copy."""

    layout: Layout
    data: np.ndarray

    def open(self) -> Bucket:
        """A copy: `data` may lie in read-only shared memory, of which torch makes no safe tensor."""
        return Bucket(self.layout, torch.from_numpy(self.data.copy()))


@dataclass(frozen=True)
class SharedBucket:
    """A bucket in the memory of a GPU, for another process on the same GPU."""

    layout: Layout
    handle: tuple[Any, ...]

    def open(self) -> Bucket:
        """In the memory of the process that made it, which must keep it until all is copied."""
        return Bucket(self.layout, rebuild_cuda_tensor(*self.handle))


def share(bucket: Bucket) -> SharedBucket:
    """What another process on this GPU needs to read the bucket, which must outlive its reading."""
    _, handle = reduce_tensor(bucket.data)
    return SharedBucket(bucket.layout, handle)


def store(bucket: Bucket) -> StoredBucket:
    """What other processes need to read the bucket anywhere; waits for the GPU."""
    return StoredBucket(bucket.layout, bucket.data.cpu().numpy())


def pack(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Converts weights and groups them into buckets of about `bucket_bytes`; a larger weight is a bucket alone."""
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        nbytes = tensor.numel() * dtype.itemsize
        if pending and size + nbytes > bucket_bytes:
            yield _bucket(pending, dtype)
            pending, size = [], 0
        pending.append((name, tensor))
        size += nbytes
    if pending:
        yield _bucket(pending, dtype)


def checksum(tensors: Iterable[Tensor]) -> int:
    """The sum of all 16-bit words: the same wherever and in whatever order the same weights lie."""
    return int(word_sum(tensors, torch.int16))


def word_sum(tensors: Iterable[Tensor], word: torch.dtype) -> Tensor:
    """The sum of all words of a size, on the tensors' device; 64-bit ones wrap around, and are added up as they lie."""
    if word == torch.int64:
        return torch.stack([tensor.view(word).sum() for tensor in tensors]).sum()
    parts = (part for tensor in tensors for part in tensor.view(word).flatten().split(SHORT_WORDS_AT_ONCE))
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


@torch.no_grad()
def _bucket(weights: list[tuple[str, Tensor]], dtype: torch.dtype) -> Bucket:
    layout = Layout(tuple(name for name, _ in weights), tuple(tuple(tensor.shape) for _, tensor in weights), dtype)
    data = torch.empty(layout.size, dtype=torch.uint8, device=weights[0][1].device)
    if layout.size > layout.nbytes + WORD_BYTES:
        data.zero_()  # what lies between the weights is added up, too
    torch._foreach_copy_(layout.tensors(data), [tensor for _, tensor in weights])
    bucket = Bucket(layout, data)
    bucket.packed_sum.copy_(bucket.sum)
    return bucket
