"""The processes of this machine, as /proc shows them."""

from contextlib import suppress
from pathlib import Path


def parents() -> dict[int, int]:
    """Living processes, each with its parent."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(stat.parent.name)] = int(parent)
    return found


def stopped() -> set[int]:
    """Processes that are stopped by a signal."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] == "T":
                found.add(int(stat.parent.name))
    return found


def description(pid: int) -> str:
    """Name and command line of a process; empty if it is gone."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return Path(f"/proc/{pid}/comm").read_text().strip() + " " + words
    return ""
