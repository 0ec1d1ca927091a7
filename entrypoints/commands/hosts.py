"""`launch hosts`: host lists, expanded and compressed."""

import argparse
from collections.abc import Mapping

from entrypoints.commands import Subcommand, write
from entrypoints.errors import UsageError
from entrypoints.hostlist import HostlistError, compress, expand


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("expression", metavar="EXPR", nargs="+", help="host lists, such as gpu-[01-16,20]")
    parser.add_argument("--compress", action="store_true", help="print one short host list instead")


def _run(parsed: argparse.Namespace, _variables: Mapping[str, str]) -> int:
    try:
        names = [name for expression in parsed.expression for name in expand(expression)]
    except HostlistError as error:
        raise UsageError(
            f"{' '.join(parsed.expression)!r} is not a host list: {error}", "for example gpu-[01-16,20]"
        ) from error
    write(compress(names) if parsed.compress else "\n".join(names))
    return 0


SUBCOMMAND = Subcommand("print the hosts of a host list, one per line.", _add_arguments, _run)
