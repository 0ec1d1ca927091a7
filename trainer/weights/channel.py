"""Weights from one actor rank to all engines at once: NCCL between GPUs, gloo between CPUs."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import WorkerError
from trainer.weights.buckets import Bucket, BucketLayout

# Interval between checks whether a transfer has finished. A bucket takes some tenths of a millisecond, most of it
# concurrent with work on the previous bucket.
POLL_SECONDS = 0.0001


class WeightChannel:
    """A separate process group in which rank 0 sends. Transfers wait at most `timeout` seconds for a peer.

    It is independent of torch's default process group, because engines have their own.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> None:
        """Waits until all ranks have connected. Raises WorkerError if one does not."""
        self._device = device
        self._timeout = timeout
        try:
            self._group = (
                _nccl(store, rank, size, timeout) if device.type == "cuda" else _gloo(store, rank, size, timeout)
            )
        except RuntimeError as error:
            raise WorkerError(f"the weight channel could not be formed: {_first_line(error)}") from error
        self._greet()

    def send(self, buckets: Iterable[Bucket]) -> None:
        """Sends each bucket to all other ranks while the next is being packed. It holds at most two buckets.

        Raises WorkerError if a receiver does not take them in time.
        """
        sending: tuple[Bucket, dist.Work] | None = None
        for bucket in buckets:
            begun = bucket, self._begin(bucket.data)
            if sending is not None:
                self._finish(sending[1])
            sending = begun
            del bucket, begun
        if sending is not None:
            self._finish(sending[1])

    def receive(self, layouts: Iterable[BucketLayout]) -> Iterator[Bucket]:
        """Yields the buckets that rank 0 sends. The next transfer is always under way, so the link is never idle.

        At most two buckets are in memory if the consumer drops each one before it asks for the next. On a GPU the
        consumer must use them on its current stream: the memory of a dropped bucket is reused as soon as that stream
        has finished with it. Raises WorkerError if a bucket does not arrive in time.
        """
        expected = map(self._expect, layouts)  # each `next` starts a transfer
        coming = next(expected, None)
        while coming is not None:
            (bucket, transfer), coming = coming, next(expected, None)
            self._finish(transfer)
            yield bucket
            del bucket, transfer  # frees memory for the bucket after the next

    def close(self) -> None:
        """Aborts the process group without waiting for peers, which then lose the connection."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _greet(self) -> None:
        """Makes the first transfer, in which NCCL connects all peers.

        If a peer dies at that moment, NCCL waits forever and cannot be interrupted. So a thread waits; it is abandoned
        after the timeout.
        """
        greeted: Future[None] = Future()
        word = torch.zeros(1, dtype=torch.uint8, device=self._device)

        def greet() -> None:
            try:
                self._finish(self._begin(word))
                greeted.set_result(None)
            except WorkerError as error:
                greeted.set_exception(error)

        Thread(target=greet, daemon=True).start()
        try:
            greeted.result(self._timeout)
        except TimeoutError as error:
            raise WorkerError(f"not all engines joined the weight channel within {self._timeout:g} s") from error

    def _expect(self, layout: BucketLayout) -> tuple[Bucket, dist.Work]:
        """An empty bucket and the transfer that fills it."""
        data = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
        return Bucket(layout, data), self._begin(data)

    def _begin(self, data: Tensor) -> dist.Work:
        """Starts a broadcast from rank 0.

        NCCL uses its own stream but first waits for the work queued on the current stream. So it neither sends bytes
        before they are written nor overwrites memory that is still being read.
        """
        if self._group is None:
            raise WorkerError("the weight channel is closed")
        try:
            return self._group.broadcast([data], dist.BroadcastOptions())
        except RuntimeError as error:
            raise self._broken(error) from error

    def _finish(self, transfer: dist.Work) -> None:
        """Waits until the transfer has finished and its bytes are visible to the current stream."""
        try:
            self._wait_for(transfer.is_completed)
            transfer.wait()  # orders the current stream after the transfer; gloo raises its errors here
            if self._device.type == "cuda":
                # NCCL reports a failed transfer as completed, but may leave a kernel that never ends. An event on the
                # stream shows whether it did.
                self._wait_for(torch.cuda.current_stream(self._device).record_event().query)
        except RuntimeError as error:
            raise self._broken(error) from error

    def _wait_for(self, done: Callable[[], bool]) -> None:
        """Polls until done: the only wait with a time limit that both NCCL and gloo support."""
        deadline = time.monotonic() + self._timeout
        while not done():
            if time.monotonic() > deadline:
                self.close()  # otherwise NCCL keeps waiting, and so do the other peers
                raise WorkerError(f"not all engines received the weights within {self._timeout:g} s")
            time.sleep(POLL_SECONDS)

    def _broken(self, error: RuntimeError) -> WorkerError:
        self.close()
        return WorkerError(f"the weight channel broke: {_first_line(error)}")


def _gloo(store: dist.Store, rank: int, size: int, timeout: float) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))


def _nccl(store: dist.Store, rank: int, size: int, timeout: float) -> "dist.ProcessGroupNCCL":
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout)  # the channel's own comes first
    # NCCL's watchdog would end this process when a peer dies. torch reads the variable when it creates the group.
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
