"""The lines of a program's output that state an error. The last line often does not."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

MOST_LINES = 10
_LONGEST_LINE = 400
"""Characters of a line."""
_TAIL = 2**20
"""Bytes at the end of a file that are read."""
_HARMLESS = re.compile(r"\[\S+ \S+ [DIW] |[IW]\d{4} |\d{4}-\d\d-\d\d \S+\s(?:TRACE|DEBUG|INFO|SUCC|WARN|WARNING)\b")
"""The start of a line below the level of an error: of Ray's C++ processes, of gRPC, of Ray's Python programs."""
_ERROR = re.compile(
    r"\[\S+ \S+ [ECF] |[EF]\d{4} |.*?(?i:\b(?:\w*error|\w*exception|fatal|panic|critical|failed|failure|fails|cannot"
    r"|could not|aborted|denied|terminate called|no such|killed|not found|timed out)\b)|\s*what\(\):"
)
_TRACEBACK = "Traceback (most recent call last):"
_DETAIL = re.compile(r"\s|\*\*\* |/\S+\(\+0x|- |\[state-dump\]|.*\s@\s+0x[0-9a-f]+\s")
"""A line of a stack trace, in Python's and in Ray's forms, of a list, or of what Ray dumps of its state."""
_WHAT = re.compile(r"\s+what\(\):")


def error_lines(output: Iterable[str]) -> list[str]:
    """The lines of a program's output that state an error, each once. Of a traceback this is the exception's line."""
    errors: dict[str, None] = {}
    in_traceback = False
    for line in output:
        if line.lstrip().startswith(_TRACEBACK):
            in_traceback = True
        elif _DETAIL.match(line) and not _WHAT.match(line):
            continue
        elif line and (in_traceback or (_ERROR.match(line) and not _HARMLESS.match(line))):
            errors[_shortened(line.strip())] = None
            in_traceback = False
    return list(errors)


def causes(output: Sequence[str]) -> list[str]:
    """The first error lines of the output of a program that failed; its last line if none states an error."""
    last = next((line for line in reversed(output) if line.strip()), None)
    return error_lines(output)[:MOST_LINES] or ([] if last is None else [_shortened(last.strip())])


def cause(output: str, otherwise: str) -> str:
    """The first line of `causes`; `otherwise` if the program wrote nothing."""
    return next(iter(causes(output.splitlines())), otherwise)


def read_tail(path: Path) -> list[str]:
    """The lines at the end of a file; none if it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"
