"""Programs of several ranks, each a process of this machine."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.training.ranks.process_group import connect_store, join, open_store

REPOSITORY = Path(__file__).parents[3]


def environment() -> dict[str, str]:
    """Of a program that imports this repository. In the image PYTHONPATH names the tests' packages too."""
    path = filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def run_program(program: str | Path, *arguments: str | Path, timeout: float = 280) -> None:
    """Runs `program ARGUMENT…`, which starts its ranks itself and has to succeed."""
    subprocess.run([sys.executable, program, *arguments], check=True, timeout=timeout, env=environment())


def run_ranks(program: Path, world_size: int, directory: Path) -> None:
    """Runs `program RANK WORLD_SIZE PORT DIRECTORY` once for each rank; all have to succeed."""
    store = open_store("127.0.0.1", world_size, timeout=60)
    arguments = [str(world_size), str(store.port), str(directory)]
    ranks = [
        subprocess.Popen([sys.executable, program, str(rank), *arguments], env=environment())
        for rank in range(world_size)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


Run = Callable[[int, int, Path], None]


def fork_ranks(run: Run, world_size: int, directory: Path) -> None:
    """Calls `run(rank, world_size, directory)` in a fork of this process for each rank of a process group on CPU; all
    have to succeed."""
    store = open_store("127.0.0.1", world_size, timeout=60)
    fork = multiprocessing.get_context("fork").Process
    ranks = [fork(target=_rank, args=(run, rank, world_size, store.port, directory)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit(f"{world_size} ranks ended with {[rank.exitcode for rank in ranks]}")


def _rank(run: Run, rank: int, world_size: int, port: int, directory: Path) -> None:
    torch.set_num_threads(1)
    join(connect_store("127.0.0.1", port, world_size, 60), rank, world_size, torch.device("cpu"), "127.0.0.1", 60)
    run(rank, world_size, directory)
    dist.barrier()
    dist.destroy_process_group()
