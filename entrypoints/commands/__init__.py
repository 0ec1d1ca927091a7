"""One file per subcommand, and the shape that all of them share."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from entrypoints import streams


@dataclass(frozen=True)
class Subcommand:
    """One subcommand: its help line, its own options, and the function that runs it."""

    purpose: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Mapping[str, str]], int | list[str]]
    """Takes the parsed options and the variables. Returns the exit status, or a command for `launch` to run."""


def write(text: str) -> None:
    """Print a result on stdout, with exactly one newline at its end. Raises OutputError if it cannot be written."""
    streams.write(text.rstrip("\n") + "\n")


def without_separator(words: list[str]) -> list[str]:
    """The command after an optional `--`."""
    return words[1:] if words[:1] == ["--"] else words
