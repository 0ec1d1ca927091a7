"""What the controller does when it is the one that stalls."""

import os
from collections.abc import Callable
from pathlib import Path


def read_a_fifo(path: Path, _ended: Callable[[], bool]) -> None:
    """Waits for the writer, which `release` is."""
    path.read_text()


def loop(_path: Path, ended: Callable[[], bool]) -> None:
    while not ended():
        pass


def release(path: Path) -> None:
    """Ends the reader's wait; without a reader there is nothing to end."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return
