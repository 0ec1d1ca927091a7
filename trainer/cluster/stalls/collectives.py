"""How many collectives a process has begun, read by another process of its node while it waits in one.

A thread of each worker answers: it waits for a byte on a pipe and writes the state of its process groups into a file
without a name. Both are opened through /proc, so the same users can ask who may read the worker's stacks.
"""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Seconds for the thread to answer, and between two looks. It cannot answer while native code holds the interpreter.
PATIENCE, INTERVAL = 2.0, 0.05


@dataclass(frozen=True)
class AnswerFile:
    """Where a process is asked, and where it answers: numbers among the open files of `pid`."""

    pid: int
    requests: int
    answers: int


@dataclass(frozen=True)
class GroupState:
    """A process group of a process. `begun` collectives were begun in it; `last` is the latest one's name, if
    PyTorch's flight recorder is on."""

    name: str
    rank: int
    size: int
    begun: int
    last: str = ""


def answer_requests() -> AnswerFile:
    """Starts the thread that answers for this process. It uses torch only if the process does."""
    read, write = os.pipe()
    descriptor, name = tempfile.mkstemp(prefix="slipway-collectives-")
    Path(name).unlink()

    def answer() -> None:
        while os.read(read, 1):
            line = json.dumps([asdict(group) for group in _groups()])
            os.write(descriptor, line.encode() + b"\n")

    threading.Thread(target=answer, name="collectives", daemon=True).start()
    return AnswerFile(os.getpid(), write, descriptor)


def read_groups(source: AnswerFile) -> tuple[GroupState, ...]:
    """The process groups of a process of this node; empty if it has none or does not answer."""
    opened = Path("/proc") / str(source.pid) / "fd"
    try:
        answers = opened / str(source.answers)
        before = answers.stat().st_size
        with (opened / str(source.requests)).open("wb", buffering=0) as requests:
            requests.write(b"?")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            time.sleep(INTERVAL)
            with answers.open("rb") as file:
                file.seek(before)
                if (line := file.read()).endswith(b"\n"):
                    return tuple(GroupState(**fields) for fields in json.loads(line))
    except OSError:  # the process has ended
        return ()
    return ()


def _groups() -> Iterator[GroupState]:
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return
    latest = _latest_names()
    for group in list(c10d._world.pg_map):
        try:
            begun = group._get_sequence_number_for_group()
        except RuntimeError:  # a backend that does not count
            continue
        yield GroupState(group.group_name, group.rank(), group.size(), begun, latest.get(group.group_name, ""))


def _latest_names() -> dict[str, str]:
    """The latest collective of each process group in the flight recorders, of NCCL and of the other backends."""
    from torch._C import _distributed_c10d as recorders

    names: dict[str, str] = {}
    for recorder in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(recorders, recorder, None)) is None:
            continue
        entries = json.loads(dump()).get("entries", [])
        names |= {entry["process_group"][0]: entry["profiling_name"] for entry in entries if not entry["is_p2p"]}
    return names
