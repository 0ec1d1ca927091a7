"""Long-lived processes, one per rank of a process group, each with its own GPU."""

import importlib
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any, Self

# Limit of a single call. The first call imports torch and starts the group.
TIMEOUT = 150.0


class Ranks:
    """Runs functions of a module on all ranks; nothing that needs torch is imported in the process of the tests.

    After a failure the processes are ended, whatever they do, and the next call starts others.
    """

    def __init__(self, size: int, device: str) -> None:
        self._size = size
        self._device = device
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, function: str, **arguments: Any) -> dict[str, Any]:
        """What `function`, as `tests.gpu.MODULE.NAME`, returns at the first rank for (device, **arguments).

        Raises AssertionError with the trace of a rank that failed, died or did not answer.
        """
        try:
            if not self._processes:
                self._start()
            for pipe in self._pipes:
                pipe.send((function, arguments))
            answers = [self._answer(rank) for rank in range(self._size)]
            return dict(answers[0])
        except BaseException:  # includes pytest-timeout's and Ctrl-C
            self._end()
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self._size, self._device), daemon=True)
            process.start()
            theirs.close()  # so that the wait ends if the process dies
            self._pipes.append(ours)
            self._processes.append(process)
        port = self._answer(0)
        for pipe in self._pipes[1:]:
            pipe.send(port)

    def _answer(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        assert pipe.poll(TIMEOUT), f"rank {rank} has not answered within {TIMEOUT:g} s"
        try:
            value, failure = pipe.recv()
        except EOFError:
            raise AssertionError(f"rank {rank} died; what it wrote is in the captured standard error") from None
        assert failure is None, f"rank {rank}: {failure}"
        return value

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []


def _serve(pipe: Connection, rank: int, size: int, device: str) -> None:
    """Joins the other ranks, then answers calls until it is killed."""
    if device == "cuda":  # like Ray: each process sees only its own GPU
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(size)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank]
    import torch

    from trainer.training.memory.allocator import use_expandable_segments
    from trainer.training.ranks.process_group import connect_store, join, open_store

    use_expandable_segments(torch.device(device))  # like the trainer's ranks
    if device == "cpu":
        torch.set_num_threads(1)
    if rank == 0:
        store = open_store("127.0.0.1", size, 60)
        pipe.send((store.port, None))
    else:
        store = connect_store("127.0.0.1", pipe.recv(), size, 60)
    join(store, rank, size, torch.device(device), "127.0.0.1", 60)
    while True:
        function, arguments = pipe.recv()
        module, _, name = function.rpartition(".")
        try:
            results = getattr(importlib.import_module(module), name)(torch.device(device), **arguments)
        except Exception:  # noqa: BLE001 - any failure of a measurement is reported to its test
            pipe.send((None, traceback.format_exc()))
        else:
            pipe.send((results, None))
