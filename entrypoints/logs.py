"""The log of `launch`: on stderr, each line with the node's rank and role."""

import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from entrypoints.errors import LaunchError, UsageError
from entrypoints.options import LOG_DIR
from entrypoints.streams import say

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""All but line feed and tab, and what turns the direction of writing."""

MOST_LINES = 20
"""Most lines of one kind about different nodes."""


def log_folder(directory: Path, node_rank: int, hostname: str) -> Path:
    """The folder of one node's logs, below a directory that all nodes may share."""
    return directory / f"node{node_rank}-{hostname.split('.')[0]}"


def start_logging(node_rank: int, local_rank: int, folder: Path | None = None) -> None:
    """Log to stderr and, if given, to `folder/launch.log`. Raises UsageError if the folder cannot be written."""
    role = "head" if node_rank == local_rank == 0 else "worker"
    task = f".{local_rank}" if local_rank else ""
    line = f"launch[{node_rank}{task} {role}]: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    logging.getLogger().handlers[0].setFormatter(_Formatter(line))
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / "launch.log", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write logs to {folder}: {error.strerror}", f"set {LOG_DIR} to a writable directory"
        ) from error
    file.setFormatter(_Formatter(f"%(asctime)s {line}"))
    logging.getLogger().addHandler(file)


def printable(text: str) -> str:
    """The text with control characters escaped: texts of other nodes and programs must not command a terminal."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def limited(lines: Sequence[str], most: int = MOST_LINES) -> list[str]:
    """The first of these lines, and a line with the number of the others."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def quoted(value: str) -> str:
    """A variable's value as a message shows it: in quotes if it would be misread after `NAME=`."""
    return repr(value) if not value or value[0] in "=^'\"" or any(letter.isspace() for letter in value) else value


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def report(error: LaunchError) -> None:
    """Show an error and its hint on stderr, and the error in the log file if there is one."""
    if logging.getLogger().handlers[1:]:  # the first handler is stderr
        logging.getLogger().handlers[1].handle(logging.makeLogRecord({"msg": f"error: {error.message}"}))
    hint = f"\n\nhint: {error.hint}" if error.hint else ""
    say(printable(f"error: {error.message}{hint}\n"))
