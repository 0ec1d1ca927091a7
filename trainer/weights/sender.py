"""The sending end of every transport, in the process of each rank of the actor."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice

import ray
import torch
from ray import ObjectRef
from torch import Tensor
from torch.distributed import TCPStore

from trainer.cluster.place import RankPlace
from trainer.config.tree import WorkersConfig
from trainer.data.batches.copies import HostCopies
from trainer.weights.buckets import BUCKETS_AT_ONCE, Bucket, BucketLayout, SharedPart, StoredBucket, pack, share, store
from trainer.weights.channel import WeightChannel


class Sender(ABC):
    """Sends a rank's trained weights, as `WeightSender` says. Its worker adds the weights, memory to share, and a store
    to meet at."""

    def __init__(self, config: WorkersConfig, place: RankPlace, device: torch.device, dtype: torch.dtype) -> None:
        self._place, self._device, self._dtype = place, device, dtype
        self._timeout = config.trainer.worker_timeout
        self._at_once = BUCKETS_AT_ONCE if config.loads_in_parts else None
        self._sharing: Iterator[Bucket] = iter(())
        self._shared: Sequence[Bucket] = ()
        self._packed: list[Bucket] = []
        self._kept, self._kept_layouts = HostCopies(), list[BucketLayout]()
        self._channel: WeightChannel | None = None
        self._channel_store: TCPStore | None = None

    @abstractmethod
    def trained_weights(self, shared_once: bool) -> Iterable[tuple[str, Tensor]]:
        """The weights that the engines get, a tied one once if it is `shared_once`. Every rank must exhaust it."""

    @abstractmethod
    def memory_to_share(self) -> AbstractContextManager[None]:
        """Frees memory; what is allocated inside can be shared with another process."""

    @abstractmethod
    def release_memory(self) -> None:
        """Returns memory that is not used any more to the other processes of a shared GPU."""

    @abstractmethod
    def store_for(self, size: int) -> TCPStore:
        """A store at which this process and `size - 1` others meet."""

    def publish_weights(self) -> tuple[list[ObjectRef], int]:
        """Puts the trained weights into Ray's object store. Every rank calls it; rank 0 returns the buckets and their
        size in bytes."""
        references, nbytes = [], 0
        for bucket in self._buckets():
            references.append(ray.put(store(bucket)))
            nbytes += bucket.layout.nbytes
        return references, nbytes

    def share_weights(self, begins: bool) -> SharedPart:
        """The first or the next of the trained weights, kept in each rank's GPU memory until the next call or
        `release_weights`. Every rank calls it until a part `ends`."""
        if begins:
            self._sharing = pack(self.trained_weights(shared_once=True), self._dtype)
        self._shared = []
        with self.memory_to_share():
            self._shared = list(islice(self._sharing, self._at_once))
        ends = self._at_once is None or len(self._shared) < self._at_once
        return SharedPart([share(bucket) for bucket in self._shared], ends)

    def release_weights(self) -> None:
        """Frees the last part of `share_weights` after the engines have copied it, or what `send_weights` has sent."""
        self._shared = []
        self.release_memory()

    def open_channel(self, size: int) -> int:
        """Rank 0 only: opens the store of the process group for broadcasts; its port."""
        self._channel_store = self.store_for(size)
        return int(self._channel_store.port)

    def join_channel(self, size: int) -> None:
        """Rank 0 only: joins that process group and waits for the engines."""
        if self._channel is not None:
            self._channel.close()
        timeout = self._timeout / 2  # shorter than the caller's time limit
        self._channel = WeightChannel(self._channel_store, 0, size, self._device, timeout)

    def pack_weights(self) -> Sequence[BucketLayout]:
        """Packs the trained weights into buckets. Every rank calls it; rank 0 keeps the buckets and returns their
        layouts, which are the same each time."""
        deque(self._packing(), maxlen=0)
        return [bucket.layout for bucket in self._packed]

    def send_weights(self) -> None:
        """Rank 0 only: broadcasts the packed buckets to all engines and starts to copy them to CPU.

        An actor with one rank may skip `pack_weights`: it then sends each bucket while it packs the next.
        """
        assert self._channel is not None
        packing = iter(self._packed) if self._packed else self._packing()
        try:
            self._channel.send(packing)
        finally:
            deque(packing, maxlen=0)  # engines that the broadcast missed need all buckets later
            self._keep_packed()

    def publish_sent_weights(self) -> list[ObjectRef]:
        """Rank 0 only: puts the buckets of the last broadcast into the object store, whatever changed since."""
        self._keep_packed()
        kept = zip(self._kept_layouts, self._kept.take(), strict=True)
        return [ray.put(StoredBucket(layout, data.numpy())) for layout, data in kept]

    def _packing(self) -> Iterator[Bucket]:
        """The buckets to send, each of which is kept. Every rank must exhaust it."""
        self._packed = []
        for bucket in self._buckets():
            self._packed.append(bucket)
            yield bucket

    def _buckets(self) -> Iterator[Bucket]:
        """The trained weights in buckets on rank 0, nothing on other ranks. Every rank must exhaust it."""
        # Engines on GPUs load in place. Engines on CPU need a shared weight under both of its names.
        weights = self.trained_weights(shared_once=self._device.type == "cuda")
        if self._place.rank == 0:
            yield from pack(weights, self._dtype)
        else:
            deque(weights, maxlen=0)

    def _keep_packed(self) -> None:
        if self._packed:
            self._kept.start([bucket.data for bucket in self._packed])
            self._kept_layouts = [bucket.layout for bucket in self._packed]
            self._packed = []
