"""Reads the Python stacks and the state of a process that does not answer.

A worker opens a file at its start, and Python's faulthandler writes all stacks there when the process gets a signal.
That works while the process waits in a collective or holds the interpreter. Another process on the node sends the
signal and reads the file, which has no name and vanishes with the worker.
"""

import faulthandler
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from trainer.cluster.stalls.collectives import AnswerFile, GroupState, answer_requests, read_groups

SIGNAL = signal.SIGUSR1
# Seconds for a process to write its stacks, between two looks at its state, and how often it is looked at.
PATIENCE, INTERVAL, LOOKS = 3.0, 0.1, 5
_PREFIX = "slipway-stacks-"
# Processes that a worker has started, of which stacks are read: enough for a pool of reward processes.
_CHILDREN = 16
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
# The package's directory, to name its files.
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class StackFile:
    """The file of a process: its number among the open files of `pid`."""

    pid: int
    descriptor: int


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        short = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else Path(*path.parts[-2:])
        return f"{self.function} ({short}:{self.line})"


@dataclass(frozen=True)
class Standing:
    """The stacks of a process's threads, innermost frame first, and a state that explains why it hangs.

    `problem` is empty for a process that runs Python and waits or computes. `groups` are its process groups, and
    `children` the processes that it has started.
    """

    problem: str
    threads: tuple[tuple[Frame, ...], ...] = ()
    busy: bool = False
    groups: tuple[GroupState, ...] = ()
    children: tuple[tuple[int, "Standing"], ...] = ()


@dataclass(frozen=True)
class Probe:
    """Handles by which other processes of the node read a worker's stacks and collectives."""

    stacks: StackFile
    collectives: AnswerFile


def open_probe() -> Probe:
    """Opens this process to others of its user, as long as it lives."""
    return Probe(open_stack_file(), answer_requests())


def read_probe(probe: Probe) -> Standing:
    """Where a worker of this node stands, with its process groups and the processes that it has started."""
    standing = read_standing(probe.stacks)
    if standing.problem:
        return standing
    children = tuple((file.pid, read_standing(file)) for file in _children(probe.stacks.pid))
    return replace(standing, groups=read_groups(probe.collectives), children=children)


def open_stack_file() -> StackFile:
    """Lets other processes of this user ask this one for its stacks. The file stays open as long as the process."""
    descriptor, name = tempfile.mkstemp(prefix=_PREFIX)
    Path(name).unlink()
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)
    return StackFile(os.getpid(), descriptor)


def read_standing(source: StackFile) -> Standing:
    """Where a process of this node stands. It must have opened its file; the signal would end any other."""
    process = Path("/proc") / str(source.pid)
    try:
        file = process / "fd" / str(source.descriptor)
        if (state := _state(process)) == "T":
            return Standing("is stopped by a signal (SIGSTOP)")
        busy = is_busy(process)
        before = file.stat().st_size
        os.kill(source.pid, SIGNAL)
        deadline = time.monotonic() + PATIENCE
        time.sleep(INTERVAL)
        while (text := _after(file, before)) == "" and time.monotonic() < deadline:
            time.sleep(INTERVAL)
    except (FileNotFoundError, ProcessLookupError):
        return Standing("has ended")
    if not text:
        return Standing("waits for a disk or a driver (state D)" if state == "D" else "does not take signals")
    return Standing("", parse_stacks(text), busy)


def parse_stacks(text: str) -> tuple[tuple[Frame, ...], ...]:
    """The threads of a report by faulthandler."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append(Frame(match[1], int(match[2]), match[3]))
    return tuple(tuple(frames) for frames in threads)


def is_busy(process: Path) -> bool:
    """Whether the main thread runs most of the time, on a processor or in the queue for one, or other threads do.

    `process` is its directory in /proc, or that of one of its threads, of which the same is said alone.
    """
    ticks, states = _ticks(process), []
    for _ in range(LOOKS):
        states.append(_state(process))
        time.sleep(INTERVAL)
    share = (_ticks(process) - ticks) / (LOOKS * INTERVAL * os.sysconf("SC_CLK_TCK"))
    return states.count("R") > LOOKS / 2 or share > 0.5


def _children(pid: int) -> Iterator[StackFile]:
    """The stack files of the processes below this one that have opened one."""
    try:
        below = psutil.Process(pid).children(recursive=True)[:_CHILDREN]
    except psutil.Error:
        return
    for child in below:
        try:
            for link in Path(f"/proc/{child.pid}/fd").iterdir():
                if link.readlink().name.startswith(_PREFIX):
                    yield StackFile(child.pid, int(link.name))
                    break
        except OSError:  # it has ended, or it belongs to another user
            continue


def _after(file: Path, size: int) -> str:
    with file.open("rb") as opened:
        opened.seek(size)
        return opened.read().decode(errors="replace")


def _state(process: Path) -> str:
    return (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def _ticks(process: Path) -> int:
    """Processor time so far, in ticks."""
    fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
