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
from trainer.weights.buckets import Bucket, Layout

# How often it is asked whether a transfer is over: some tenths of a millisecond a bucket, most of them beside the work
# on the one before.
POLL_SECONDS = 0.0001


class WeightChannel:
    """A process group of its own, in which rank 0 sends. No transfer waits longer than `timeout` seconds for a peer.

    It is no part of torch's world: engines have process groups of theirs.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> None:
        """Waits until all have come. Raises WorkerError."""
        self._device = device
        self._timeout = timeout
        try:
            self._group = (
                _nccl(store, rank, size, timeout) if device.type == "cuda" else _gloo(store, rank, size, timeout)
            )
        except RuntimeError as error:
            raise WorkerError(f"the channel for weights was not formed: {_first_line(error)}") from error
        self._greet()

    def send(self, buckets: Iterable[Bucket]) -> None:
        """Sends each bucket to all others as soon as it is there, beside the making of the next; they must outlive this
        call. Raises WorkerError if they are not taken in time."""
        for transfer in [self._begin(bucket.data) for bucket in buckets]:
            self._finish(transfer)

    def receive(self, layouts: Iterable[Layout]) -> Iterator[Bucket]:
        """What rank 0 sends, bucket by bucket; the next is on its way before one has arrived, so that the link never
        waits for this end, and while one is at the consumer's.

        A consumer that drops each bucket before it asks for the next has never more than two of them in memory. On a
        GPU what it does with them must be in the order of its current stream: a dropped bucket's memory takes the next
        one as soon as that stream is done with it. Raises WorkerError if one does not come in time.
        """
        expected = map(self._expect, layouts)  # begins a transfer each time it is asked
        coming = next(expected, None)
        while coming is not None:
            (bucket, transfer), coming = coming, next(expected, None)
            self._finish(transfer)
            yield bucket
            del bucket, transfer  # its memory may be wanted for the one after the next

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
                self._finish(self._begin(word))
                greeted.set_result(None)
            except WorkerError as error:
                greeted.set_exception(error)

        Thread(target=greet, daemon=True).start()
        try:
            greeted.result(self._timeout)
        except TimeoutError as error:
            raise WorkerError(f"the channel for weights did not connect all within {self._timeout:g} s") from error

    def _expect(self, layout: Layout) -> tuple[Bucket, dist.Work]:
        """A bucket, and the transfer that fills it."""
        data = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
        return Bucket(layout, data), self._begin(data)

    def _begin(self, data: Tensor) -> dist.Work:
        """Begins to broadcast from rank 0. NCCL does so on a stream of its own, after what the current stream has to do
        by now: it neither sends bytes that are not there yet nor writes where someone still reads."""
        if self._group is None:
            raise WorkerError("the channel for weights is closed")
        try:
            return self._group.broadcast([data], dist.BroadcastOptions())
        except RuntimeError as error:
            raise self._broken(error) from error

    def _finish(self, transfer: dist.Work) -> None:
        """Waits until the bytes are there, also for this process."""
        try:
            self._wait_for(transfer.is_completed)
            transfer.wait()  # orders the current stream after the transfer; gloo raises here what went wrong
            if self._device.type == "cuda":
                # NCCL raises nothing: a transfer that failed is completed, too, and may leave a kernel behind that
                # never ends. The stream tells whether it did.
                self._wait_for(torch.cuda.current_stream().record_event().query)
        except RuntimeError as error:
            raise self._broken(error) from error

    def _wait_for(self, done: Callable[[], bool]) -> None:
        """Asks again and again, the only way to bound a wait that NCCL and gloo share."""
        deadline = time.monotonic() + self._timeout
        while not done():
            if time.monotonic() > deadline:
                self.close()  # else NCCL would go on waiting, and the other peers for this one
                raise WorkerError(f"weights were not taken by all within {self._timeout:g} s")
            time.sleep(POLL_SECONDS)

    def _broken(self, error: RuntimeError) -> WorkerError:
        self.close()
        return WorkerError(f"the channel for weights broke: {_first_line(error)}")


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
