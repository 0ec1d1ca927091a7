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
        # The buckets of the last broadcast: their layouts, and copies of their bytes.
        self._kept: list[tuple[BucketLayout, HostCopies]] = []
        self._channel: WeightChannel | None = None
        self._channel_store: TCPStore | None = None

    @abstractmethod
    def trained_weights(self, shared_once: bool) -> Iterable[tuple[str, Tensor]]:
        """The weights that the engines get, a tied one once if it is `shared_once`. Every rank must exhaust it."""

    @abstractmethod
    def fixed_weights(self) -> Iterable[tuple[str, Tensor]]:
        """What else the engines get, in its own type: the buffers of a model's files."""

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
            self._sharing = self._all_packed(shared_once=True)
        self._shared = []
        with self.memory_to_share():
            self._shared = list(islice(self._sharing, self._at_once))
        ends = self._at_once is None or len(self._shared) < self._at_once
        return SharedPart([share(bucket) for bucket in self._shared], ends)

    def release_weights(self) -> None:
        """Frees the last part of `share_weights` after the engines have copied it, or the last of `send_weights`."""
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

    def weight_layouts(self) -> Sequence[BucketLayout]:
        """The layouts of the buckets to send, which are the same each time. Every rank calls it; rank 0 has them."""
        return [bucket.layout for bucket in self._buckets()]

    def send_weights(self) -> None:
        """Broadcasts the trained weights to all engines, each bucket while the next one is gathered and packed, and
        copies them to CPU. Every rank calls it; rank 0 sends."""
        packing = self._keeping()
        try:
            if self._place.rank == 0:
                assert self._channel is not None
                self._channel.send(packing)
        finally:
            deque(packing, maxlen=0)  # engines that the broadcast missed need all buckets later

    def keep_weights(self) -> None:
        """Copies the trained weights to CPU as `send_weights` does, without a broadcast. Every rank calls it."""
        deque(self._keeping(), maxlen=0)

    def publish_sent_weights(self) -> list[ObjectRef]:
        """Rank 0 only: puts the buckets of the last broadcast into the object store, whatever changed since."""
        return [ray.put(StoredBucket(layout, copies.take()[0].numpy())) for layout, copies in self._kept]

    def _keeping(self) -> Iterator[Bucket]:
        """The buckets to send, each of which is copied to CPU. Every rank must exhaust it."""
        before, self._kept = [copies for _, copies in self._kept], []
        for place, bucket in enumerate(self._buckets()):
            copies = before[place] if place < len(before) else HostCopies()
            copies.start([bucket.data])
            self._kept.append((bucket.layout, copies))
            yield bucket

    def _buckets(self) -> Iterator[Bucket]:
        """The trained weights in buckets on rank 0, nothing on other ranks. Every rank must exhaust it."""
        # Engines on GPUs load in place. Engines on CPU need a shared weight under both of its names.
        shared_once = self._device.type == "cuda"
        if self._place.rank == 0:
            yield from self._all_packed(shared_once)
        else:
            deque(self.trained_weights(shared_once), maxlen=0)

    def _all_packed(self, shared_once: bool) -> Iterator[Bucket]:
        yield from pack(self.trained_weights(shared_once), self._dtype)
        yield from pack(self.fixed_weights(), None)
