"""What `launch` can do besides launching: each subcommand reads, prints its result on stdout and ends."""

import argparse
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from entrypoints.commands.environments import as_lines, as_markdown
from entrypoints.commands.explain import as_json, as_text, explain
from entrypoints.environments import detect
from entrypoints.errors import UsageError
from entrypoints.host.child_environment import child_environment
from entrypoints.host.settings import examine_host
from entrypoints.host.tree import Tree
from entrypoints.hostlist import HostlistError, compress, expand
from entrypoints.options import REPORT_DIR
from entrypoints.preflight import as_table, failures, preflight_node, refuse, run_checks
from entrypoints.ray.attach import attach, find_note


@dataclass(frozen=True)
class Subcommand:
    purpose: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Mapping[str, str]], int | list[str]]
    """Returns the exit status, or a command to launch."""


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--sysfs-root", metavar="DIR", type=Path, default=Path("/"), help="look at a recorded host")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what would be run")


def _explain(parsed: argparse.Namespace, variables: Mapping[str, str]) -> int:
    detection = detect(variables, parsed.hostname or socket.gethostname())
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    host = examine_host(Tree.at(parsed.sysfs_root), variables)
    document = explain(detection, host, variables, parsed.control_port, command)
    _print((as_json if parsed.json else as_text)(document))
    return 0


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("expression", metavar="EXPR", nargs="+", help="a host list, or names with --compress")
    parser.add_argument("--compress", action="store_true", help="the other way round: names to the short form")


def _hosts(parsed: argparse.Namespace, _variables: Mapping[str, str]) -> int:
    try:
        names = [name for expression in parsed.expression for name in expand(expression)]
    except HostlistError as error:
        raise UsageError(
            f"{' '.join(parsed.expression)!r} is no host list: {error}", "for example gpu-[01-16,20]"
        ) from error
    _print(compress(names) if parsed.compress else "\n".join(names))
    return 0


def _add_environments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="as the page docs/environments.md")


def _environments(parsed: argparse.Namespace, _variables: Mapping[str, str]) -> int:
    _print(as_markdown() if parsed.markdown else as_lines())
    return 0


def _add_preflight(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--network", action="store_true", help="form the cluster and measure each pair of nodes too")
    parser.add_argument("--sysfs-root", metavar="DIR", type=Path, default=Path("/"), help="look at a recorded host")


def _preflight(parsed: argparse.Namespace, variables: Mapping[str, str]) -> int | list[str]:
    if parsed.network:
        as_document = ["--json"] if parsed.json else []
        directory = variables.get(REPORT_DIR) or "."
        return [sys.executable, "-P", "-m", "entrypoints.preflight.network", "--output", directory, *as_document]
    hostname = parsed.hostname or socket.gethostname()
    tree = Tree.at(parsed.sysfs_root)
    allocation = detect(variables, hostname).allocation
    place = preflight_node(tree, examine_host(tree, variables), allocation, variables, parsed.control_port)
    findings = run_checks(place)
    document = {"host": hostname, "findings": [finding.document() for finding in findings]}
    _print(as_json(document) if parsed.json else as_table(findings))
    refuse({hostname: failures(findings)}, Path(variables.get(REPORT_DIR) or "."))
    return 0


def _add_attach(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", metavar="ID", help="whose cluster, if several of yours run on this node")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="default a shell")


def _attach(parsed: argparse.Namespace, variables: Mapping[str, str]) -> int:
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    attach(find_note(parsed.job), command, child_environment(variables))


def _print(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")


SUBCOMMANDS = {
    "explain": Subcommand("say what was detected and why, and do nothing.", _add_explain, _explain),
    "hosts": Subcommand("print the hosts of a host list, one a line.", _add_hosts, _hosts),
    "attach": Subcommand("run a command beside a running job, on one of its nodes.", _add_attach, _attach),
    "preflight": Subcommand("check whether this node is fit for a job.", _add_preflight, _preflight),
    "environments": Subcommand("list the environments that are understood.", _add_environments, _environments),
}
