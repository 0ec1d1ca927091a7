"""The processes of this machine, as /proc shows them, and how a test ends those that it left on purpose."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path


def parents() -> dict[int, int]:
    """Living processes, each with its parent."""
    return {pid: int(parent) for pid, (state, parent) in _states().items() if state != "Z"}


def children(pid: int) -> list[int]:
    """The living children of a process."""
    return [child for child, parent in parents().items() if parent == pid]


def descendants(pid: int) -> list[int]:
    """The living children of a process, theirs, and so on, nearest first."""
    below: dict[int, list[int]] = {}
    for child, parent in parents().items():
        below.setdefault(parent, []).append(child)
    children = list(below.get(pid, []))
    for child in children:
        children += below.get(child, [])
    return children


def stopped() -> set[int]:
    """Processes that are stopped by a signal."""
    return {pid for pid, (state, _) in _states().items() if state == "T"}


def _states() -> dict[int, tuple[str, str]]:
    """State and parent of each process."""
    states = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            states[int(stat.parent.name)] = (state, parent)
    return states


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):  # gone before the open, or between it and the read
        return False


def name_of(pid: int) -> str:
    """The name of a process; empty if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return ""


def description(pid: int) -> str:
    """Name and command line of a process; empty if it is gone."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{name_of(pid)} {words}"
    return ""


def named(*words: str) -> list[int]:
    """Processes whose name and command line contain all of `words`."""
    return [pid for pid in parents() if all(word in description(pid) for word in words)]


def freeze(find: Callable[[], Iterable[int]]) -> list[int]:
    """Stops the processes that `find` returns until it finds no new one, so that none starts another before its end."""
    frozen: set[int] = set()
    while new := set(find()) - frozen:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        frozen |= new
    return sorted(frozen)


def kill(pids: Iterable[int], patience: float = 60.0) -> None:
    """Kills processes and waits until they are gone: a signal takes effect after the call that sends it."""
    left = set(pids)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + patience
    while left := {pid for pid in left if alive(pid)}:
        assert time.monotonic() < deadline, f"still running: {[description(pid) for pid in left]}"
        time.sleep(0.02)
