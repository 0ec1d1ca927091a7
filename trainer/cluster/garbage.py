"""Python's garbage collector: run at the end of a pass, not while other ranks wait for this one, nor in imports."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Live objects that a collection may visit: about 20 ms. A rank that has imported torch and compiled a network has
# half a million, which take 160 to 500 ms.
FEW_OBJECTS = 50_000


def collect_garbage() -> None:
    """Frees unreachable cycles, and freezes the live objects once there are so many that visiting them takes long.

    Cycles that are frozen alive and dropped later are freed when enough new objects have come for the next freeze.
    Freezing after every collection would keep all of them until the process ends.
    """
    gc.collect()
    if len(gc.get_objects(generation=2)) > FEW_OBJECTS:
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@contextmanager
def without_collections() -> Iterator[None]:
    """Collects no garbage while the block runs: for imports of torch, Transformers and vLLM, and an engine's start.

    They leave half a million objects, and hardly any garbage. To visit those again and again takes a quarter of the
    time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
