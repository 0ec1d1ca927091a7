"""Buckets: the actor's weights packed into a few large blocks with checksums, to be sent to the engines.

Processes on the same GPU share a bucket through a handle (CUDA IPC). All others receive its bytes.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

BUCKET_BYTES = 512 * 2**20
# That an actor shares at a time with the engines on its GPUs.
BUCKETS_AT_ONCE = 4
# A bucket's checksum is the sum of its 64-bit words, modulo 2^64. torch sums them without a conversion.
WORD_BYTES = 8
# The place of the sender's device among the arguments of torch's `rebuild_cuda_tensor`.
DEVICE_IN_HANDLE = 6
# To sum shorter words, torch first converts them to 64 bits; this many at a time take 128 MiB.
SHORT_WORDS_AT_ONCE = 2**24


@dataclass(frozen=True)
class BucketLayout:
    """The weights in a bucket, in order. Each starts at a whole word; the last word holds the checksum."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, without padding and checksum."""
        return sum(math.prod(shape) for shape in self.shapes) * int(self.dtype.itemsize)

    @property
    def size(self) -> int:
        """Bytes of the bucket."""
        return sum(self._lengths()) * int(self.dtype.itemsize) + WORD_BYTES

    def tensors(self, data: Tensor) -> list[Tensor]:
        """The weights as views of a bucket's bytes."""
        pieces = data[:-WORD_BYTES].view(self.dtype).split(self._lengths())
        return [piece[: math.prod(shape)].view(shape) for shape, piece in zip(self.shapes, pieces, strict=True)]

    def _lengths(self) -> list[int]:
        """The number of elements of each weight, padded to a whole word."""
        word = WORD_BYTES // self.dtype.itemsize
        return [-(-math.prod(shape) // word) * word for shape in self.shapes]


@dataclass(frozen=True)
class Bucket:
    """Weights as bytes, followed by the checksum that they were packed with. `data` is [layout.size] uint8."""

    layout: BucketLayout
    data: Tensor

    def open(self) -> "Bucket":
        return self

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by name, as views of the bucket."""
        return zip(self.layout.names, self.layout.tensors(self.data), strict=True)

    @property
    def packed_sum(self) -> Tensor:
        """The checksum at packing, a 0-dimensional int64 tensor on the bucket's device."""
        return self.data[-WORD_BYTES:].view(torch.int64)[0]

    @property
    def sum(self) -> Tensor:
        """The current checksum, in the same form. If it differs from `packed_sum`, the data changed on the way."""
        return self.data[:-WORD_BYTES].view(torch.int64).sum()


class SentBucket(Protocol):
    """A bucket as it is sent; `open` returns the bucket in the receiving process."""

    def open(self) -> Bucket: ...


@dataclass(frozen=True)
class StoredBucket:
    """A bucket as a numpy array, which Ray shares between the processes of a node without a copy."""

    layout: BucketLayout
    data: np.ndarray

    def open(self) -> Bucket:
        """Copies the data: it may be in read-only shared memory, which torch tensors do not support."""
        return Bucket(self.layout, torch.from_numpy(self.data.copy()))

    def on(self, device: torch.device) -> Bucket:
        """The bucket in the memory of a GPU, copied straight from shared memory."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, about memory that may not be written
            data = torch.from_numpy(self.data)
        return Bucket(self.layout, data.to(device, copy=True))


@dataclass(frozen=True)
class SharedBucket:
    """A handle to a bucket in GPU memory, for another process on the same GPU."""

    layout: BucketLayout
    handle: tuple[Any, ...]

    def open(self) -> Bucket:
        """Maps the memory of the sending process, which must keep the bucket until it has been copied.

        This process may see more GPUs than the sender and number them differently; its own is the current one.
        """
        before, after = self.handle[:DEVICE_IN_HANDLE], self.handle[DEVICE_IN_HANDLE + 1 :]
        return Bucket(self.layout, rebuild_cuda_tensor(*before, torch.cuda.current_device(), *after))


@dataclass(frozen=True)
class SharedPart:
    """Some of the buckets of an update; `ends` means that they are the last."""

    buckets: Sequence[SharedBucket]
    ends: bool


def share(bucket: Bucket) -> SharedBucket:
    """A handle for another process on this GPU. The bucket must outlive its use there."""
    _, handle = reduce_tensor(bucket.data)
    return SharedBucket(bucket.layout, handle)


def store(bucket: Bucket) -> StoredBucket:
    """The bucket in CPU memory, for processes anywhere. Waits for the GPU."""
    return StoredBucket(bucket.layout, bucket.data.cpu().numpy())


def pack(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Converts weights to `dtype` and packs them into buckets of at most `bucket_bytes`. A larger weight is alone.

    Without `dtype` they keep their types, and a bucket ends where the type changes.
    """
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        nbytes = tensor.numel() * (dtype or tensor.dtype).itemsize
        if pending and (size + nbytes > bucket_bytes or (dtype is None and tensor.dtype != pending[0][1].dtype)):
            yield _bucket(pending, dtype or pending[0][1].dtype)
            pending, size = [], 0
        pending.append((name, tensor))
        size += nbytes
    if pending:
        yield _bucket(pending, dtype or pending[0][1].dtype)


def checksum(tensors: Iterable[Tensor]) -> int:
    """The sum of all 16-bit words, which does not depend on the order or placement of the weights."""
    return int(word_sum(tensors, torch.int16))


def word_sum(tensors: Iterable[Tensor], word: torch.dtype) -> Tensor:
    """The sum of all words of type `word` as a 0-dimensional int64 tensor on the tensors' device, modulo 2^64."""
    if word == torch.int64:
        return torch.stack([tensor.view(word).sum() for tensor in tensors]).sum()
    parts = (part for tensor in tensors for part in tensor.view(word).flatten().split(SHORT_WORDS_AT_ONCE))
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


@torch.no_grad()
def _bucket(weights: list[tuple[str, Tensor]], dtype: torch.dtype) -> Bucket:
    layout = BucketLayout(
        tuple(name for name, _ in weights), tuple(tuple(tensor.shape) for _, tensor in weights), dtype
    )
    data = torch.empty(layout.size, dtype=torch.uint8, device=weights[0][1].device)
    if layout.size > layout.nbytes + WORD_BYTES:
        data.zero_()  # the checksum includes the padding between weights
    torch._foreach_copy_(layout.tensors(data), [tensor for _, tensor in weights])
    bucket = Bucket(layout, data)
    bucket.packed_sum.copy_(bucket.sum)
    return bucket
