"""Garbage is collected on request, without visiting long-lived objects and without keeping dead ones."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from trainer.cluster import garbage
from trainer.cluster.garbage import collect_garbage, without_collections


class Cycle:
    """Refers to itself, so only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Nothing is frozen before and after a test, and only `collect_garbage` collects."""
    gc.unfreeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def is_visited(cycle: Cycle) -> bool:
    return any(live is cycle for live in gc.get_objects())


def test_long_lived_objects_are_not_visited_again() -> None:
    many = [Cycle() for _ in range(garbage.FEW_OBJECTS)]
    assert is_visited(many[0])
    collect_garbage()
    assert not is_visited(many[0])


def test_a_cycle_that_was_dropped_before_a_collection_is_freed() -> None:
    dropped = weakref.ref(Cycle())
    assert dropped() is not None
    collect_garbage()
    assert dropped() is None


def test_a_cycle_that_outlived_a_collection_is_freed_by_the_next_one() -> None:
    _settled = [Cycle() for _ in range(garbage.FEW_OBJECTS)]
    collect_garbage()
    for _ in range(3):
        alive = Cycle()
        seen = weakref.ref(alive)
        collect_garbage()
        del alive
        collect_garbage()
        assert seen() is None


def test_a_frozen_cycle_is_freed_by_the_next_freeze() -> None:
    first = [Cycle() for _ in range(garbage.FEW_OBJECTS)]
    seen = weakref.ref(first[0])
    collect_garbage()
    del first
    collect_garbage()
    assert seen() is not None  # the price of short collections
    _second = [Cycle() for _ in range(garbage.FEW_OBJECTS)]
    collect_garbage()
    assert seen() is None


def test_imports_are_not_interrupted_by_collections() -> None:
    gc.enable()
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()
