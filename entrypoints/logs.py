"""How `launch` talks: to stderr, each line with the node that says it."""

import logging
import sys

from entrypoints.environments import Allocation
from entrypoints.errors import LaunchError


def start_logging(allocation: Allocation) -> None:
    role = "head" if allocation.is_head else "worker"
    task = f".{allocation.local_rank}" if allocation.local_rank else ""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"launch[{allocation.node_rank}{task} {role}]: %(message)s"
    )


def report(error: LaunchError) -> None:
    """The one place where an error is shown."""
    sys.stderr.write(f"error: {error.message}\n")
    if error.hint:
        sys.stderr.write(f"\nhint: {error.hint}\n")
