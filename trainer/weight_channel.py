"""Weights from one actor rank to all engines at once: NCCL between GPUs, gloo between CPUs."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread

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
        try:
            self._group = (
                _nccl(store, rank, size, timeout) if device.type == "cuda" else _gloo(store, rank, size, timeout)
            )
        except RuntimeError as error:
            raise EngineError(f"the channel for weights was not formed: {_first_line(error)}") from error
        self._greet()

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

    def _greet(self) -> None:
        """The first transfer, in which NCCL connects all peers.

        Should one be lost just then, NCCL would wait for ever where nothing can interrupt it: hence the thread, which
        is left behind in that case.
        """
        greeted: Future[None] = Future()
        word = torch.zeros(1, dtype=torch.uint8, device=self._device)

        def greet() -> None:
            try:
                self._broadcast(word)
                greeted.set_result(None)
            except EngineError as error:
                greeted.set_exception(error)

        Thread(target=greet, daemon=True).start()
        try:
            greeted.result(self._timeout)
        except TimeoutError as error:
            raise EngineError(f"the channel for weights did not connect all within {self._timeout:g} s") from error

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


def _gloo(store: dist.Store, rank: int, size: int, timeout: float) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))


def _nccl(store: dist.Store, rank: int, size: int, timeout: float) -> "dist.ProcessGroupNCCL":
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout)  # the channel's own comes first
    # Its watchdog would end the process when a peer is lost; the variable is read as the group is made.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
