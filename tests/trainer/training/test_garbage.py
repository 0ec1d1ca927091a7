"""Garbage is found when asked for, and what lives is left alone from then on."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from trainer.training.garbage import collect_garbage


class Node:
    """Part of a ring, which only the search for garbage frees."""

    def __init__(self) -> None:
        self.ring = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_lives_is_not_looked_at_again() -> None:
    alive = Node()
    assert any(found is alive for found in gc.get_objects())
    collect_garbage()
    assert not any(found is alive for found in gc.get_objects())


def test_what_was_made_since_is_freed_by_the_next_search() -> None:
    collect_garbage()
    made = weakref.ref(Node())
    assert made() is not None
    collect_garbage()
    assert made() is None


def test_what_lived_and_is_dropped_does_not_add_up() -> None:
    collect_garbage()
    before = gc.get_freeze_count()
    for _ in range(20):
        alive = [[number] for number in range(100)]
        collect_garbage()
        del alive
    assert gc.get_freeze_count() - before < 100
