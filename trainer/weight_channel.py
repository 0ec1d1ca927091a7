"""Weights from one actor rank to all engines at once: NCCL between GPUs, gloo between CPUs."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import EngineError
from trainer.training.weights import Layout, checksum


@dataclass(frozen=True)
class Announcement:
    """A bucket that is going to be sent."""

    layout: Layout
    size: int
    checksum: int


@dataclass(frozen=True)
class ReceivedBucket:
    """Some weights as bytes in a tensor of this process."""

    layout: Layout
    data: Tensor
    checksum: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by name; they share memory with the bucket."""
        for name, shape, piece in self.layout.pieces(self.data):
            yield name, piece.view(self.layout.dtype).view(shape)

    def arrived_sum(self) -> int:
        """The sum of what is here; another than `checksum` means that something was lost on the way."""
        return checksum([self.data])


class WeightChannel:
    """A process group of its own, in which rank 0 sends. No transfer waits longer than `timeout` seconds for a peer.

    It is no part of torch's world: engines have process groups of theirs.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> None:
        """Waits until all have come. Raises EngineError."""
        self._device = device
        self._timeout = timeout
        # NCCL's own watchdog ends the process when its time is over: let ours be over first.
        limit = timedelta(seconds=2 * timeout)
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise EngineError(f"the channel for weights was not formed: {_first_line(error)}") from error

    def send(self, data: Tensor) -> None:
        """Sends bytes to all others. Raises EngineError if they are not taken in time."""
        self._broadcast(data)

    def receive(self, announced: Announcement) -> ReceivedBucket:
        """What rank 0 sends. Raises EngineError if it does not come in time."""
        data = torch.empty(announced.size, dtype=torch.uint8, device=self._device)
        self._broadcast(data)
        return ReceivedBucket(announced.layout, data, announced.checksum)

    def close(self) -> None:
        """Lets go of the peers, also of those that do not answer; they hear of it by losing the connection."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _broadcast(self, data: Tensor) -> None:
        deadline = time.monotonic() + self._timeout
        if self._group is None:
            raise EngineError("the channel for weights is closed")
        try:
            work = self._group.broadcast([data], dist.BroadcastOptions())  # from rank 0
            # The only way to bound the wait that NCCL and gloo share.
            while not work.is_completed():
                if time.monotonic() > deadline:
                    self.close()  # else NCCL would go on waiting, and the other peers for this one
                    raise EngineError(f"weights were not taken by all within {self._timeout:g} s")
                time.sleep(0.0005)
            work.wait()
        except RuntimeError as error:
            self.close()
            raise EngineError(f"the channel for weights broke: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
