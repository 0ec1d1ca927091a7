"""How `launch` talks: to stderr, each line with the node that says it."""

import logging
import sys
from pathlib import Path

from entrypoints.environments import Allocation
from entrypoints.errors import LaunchError, UsageError
from entrypoints.options import LOG_DIR


def log_folder(directory: Path, allocation: Allocation, hostname: str) -> Path:
    """Where a node keeps its logs, below a directory that all nodes may share."""
    return directory / f"node{allocation.node_rank}-{hostname.split('.')[0]}"


def start_logging(allocation: Allocation, folder: Path | None = None) -> None:
    """Talk to stderr, and into `folder/launch.log` too. Raises UsageError if the folder cannot be written."""
    role = "head" if allocation.is_head else "worker"
    task = f".{allocation.local_rank}" if allocation.local_rank else ""
    words = f"launch[{allocation.node_rank}{task} {role}]: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=words)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / "launch.log", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write logs to {folder}: {error.strerror}", f"set {LOG_DIR} to a writable directory"
        ) from error
    file.setFormatter(logging.Formatter(f"%(asctime)s {words}"))
    logging.getLogger().addHandler(file)


def report(error: LaunchError) -> None:
    """The one place where an error is shown."""
    if logging.getLogger().handlers[1:]:  # a file beside stderr
        logging.getLogger().handlers[1].handle(logging.makeLogRecord({"msg": f"error: {error.message}"}))
    sys.stderr.write(f"error: {error.message}\n")
    if error.hint:
        sys.stderr.write(f"\nhint: {error.hint}\n")
