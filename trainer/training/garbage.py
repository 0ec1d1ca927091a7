"""Python's search for garbage, at moments when nobody waits."""

import gc


def collect_garbage() -> None:
    """Looks for garbage now, and never again at what is alive.

    By itself Python looks at all objects whenever enough new ones have come together. A process that has imported torch
    and compiled a network has half a million: its search takes 0.3 to 0.5 s, in which the ranks beside it wait.
    """
    gc.collect()
    gc.freeze()
