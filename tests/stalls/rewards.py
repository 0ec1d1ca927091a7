"""Reward functions that never end."""

import threading
from pathlib import Path


def hang(extra_info: dict[str, str], **_answer: object) -> float:
    """A lock that nobody releases."""
    Path(extra_info["begun"]).touch()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
    return 0.0


def loop(extra_info: dict[str, str], **_answer: object) -> float:
    Path(extra_info["begun"]).touch()
    while True:
        pass
