"""`launch attach`: a command beside a running job."""

import argparse
from collections.abc import Mapping

from entrypoints.commands import Subcommand, without_separator
from entrypoints.host.child_environment import child_environment
from entrypoints.ray.attach import attach, find_note


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", metavar="ID", help="the job, needed if several of yours run on this node")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="default: your shell")


def _run(parsed: argparse.Namespace, variables: Mapping[str, str]) -> int:
    attach(find_note(parsed.job), without_separator(parsed.command), child_environment(variables))


SUBCOMMAND = Subcommand("run a command beside a running job, on one of its nodes.", _add_arguments, _run)
