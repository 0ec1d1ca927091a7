"""Reward functions that never end."""

import threading


def hang(**_answer: object) -> float:
    """A lock that nobody releases."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
    return 0.0


def loop(**_answer: object) -> float:
    while True:
        pass
