"""The `launch` command line. Nothing heavy is imported before it is known to be needed."""

import argparse
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from entrypoints.commands import attach, environments, explain, hosts, preflight
from entrypoints.environments.explicit import HEAD, HOST_FILE, HOSTS, NODE_RANK, NODES
from entrypoints.errors import LaunchError, UsageError
from entrypoints.host.settings import read_manifest
from entrypoints.host.tree import Tree
from entrypoints.host.versions import slipway_version
from entrypoints.logs import report
from entrypoints.options import (
    CONTROL_PORT,
    DASHBOARD,
    DEADLINE,
    LOG_DIR,
    MIN_NODES,
    REPORT_DIR,
    Dashboard,
    Options,
    RayOptions,
)

_HOW_TO_RUN = "write `launch -- COMMAND ...` or `launch train KEY=VALUE ...`"
_SAID = {"hosts": HOSTS, "hostfile": HOST_FILE, "node_rank": NODE_RANK, "nodes": NODES, "head": HEAD}
"""Options that are short for a variable, which every environment may read."""

SUBCOMMANDS = {
    "explain": explain.SUBCOMMAND,
    "hosts": hosts.SUBCOMMAND,
    "attach": attach.SUBCOMMAND,
    "preflight": preflight.SUBCOMMAND,
    "environments": environments.SUBCOMMAND,
}

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `launch`; returns its exit status, as documented in `errors`."""
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments), os.environ)
    except LaunchError as error:
        report(error)
        return error.exit_code


def _main(arguments: list[str], variables: Mapping[str, str]) -> int:
    parsed = _parser(variables).parse_args(arguments)
    if parsed.words[:1] and parsed.words[0] in SUBCOMMANDS:
        subcommand = SUBCOMMANDS[parsed.words[0]]
        parser = Parser(prog=f"launch {parsed.words[0]}", description=subcommand.purpose, allow_abbrev=False)
        _add_place(parser)
        subcommand.add_arguments(parser)
        rest, parsed.words = parsed.words[1:], []
        parsed = parser.parse_args(rest, parsed)
        result = subcommand.run(parsed, _with_options(variables, parsed))
        if isinstance(result, int):
            return result
        parsed.words = ["--", *result]
    options = _options(parsed, variables.get(REPORT_DIR) or ".")
    from entrypoints.job.launch import launch, locate  # asyncio alone would double the time of `launch explain`

    variables = _with_options(variables, parsed)
    hostname = parsed.hostname or socket.gethostname()
    return launch(locate(variables, hostname, options.deadline), options, hostname, variables)


def _with_options(variables: Mapping[str, str], parsed: argparse.Namespace) -> dict[str, str]:
    said = {name: getattr(parsed, option) for option, name in _SAID.items()}
    return {**variables, **{name: value for name, value in said.items() if value is not None}}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see `{self.prog} --help`")


class _ShowVersion(argparse.Action):
    """Reads the version only when asked for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        sys.stdout.write(f"launch {slipway_version(read_manifest(Tree())) or 'of unknown version'}\n")
        parser.exit()


def _parser(variables: Mapping[str, str]) -> Parser:
    parser = Parser(
        prog="launch",
        usage="launch [options] -- COMMAND ...\n       launch [options] train KEY=VALUE ...\n"
        + "".join(f"       launch [options] {name} ...\n" for name in SUBCOMMANDS),
        description="Find this job's other nodes, form one Ray cluster with them and run a command on its head. "
        "`train` is short for the trainer. "
        + " ".join(f"`{name}`: {subcommand.purpose}" for name, subcommand in SUBCOMMANDS.items()),
        epilog="An option can also be given by the variable in its brackets. Several nodes need a shared secret: "
        "SLIPWAY_TOKEN or SLIPWAY_TOKEN_FILE.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action=_ShowVersion, nargs=0, help="print the version and exit")
    _add_place(parser)
    add(
        "--deadline",
        metavar="SECONDS",
        type=_seconds,
        default=_variable(variables, DEADLINE, _seconds) or 300.0,
        help=f"to form the cluster; default 300 [{DEADLINE}]",
    )
    add(
        "--control-port",
        metavar="PORT",
        type=_port,
        default=_variable(variables, CONTROL_PORT, _port),
        help=f"where the head listens, the same on all nodes; default from the job id [{CONTROL_PORT}]",
    )
    add("--grace", metavar="SECONDS", type=_seconds, default=5.0, help="from SIGTERM to SIGKILL, default 5")
    add("--warning-grace", metavar="SECONDS", type=_seconds, default=120.0, help="the same after SIGUSR1, default 120")
    add(
        "--min-nodes",
        metavar="N",
        type=_positive,
        default=_variable(variables, MIN_NODES, _positive),
        help=f"go on with so many: after a loss the command starts again on the nodes that are left [{MIN_NODES}]",
    )
    add("--log-dir", metavar="DIR", default=variables.get(LOG_DIR), help=f"keep every node's logs there [{LOG_DIR}]")
    add("--no-preflight", action="store_true", help="take part even if the checks of this node fail")
    add("--no-ray", action="store_true", help="run the command without Ray; on one node without checks, too")
    add("--num-cpus", metavar="N", type=_count, help="what Ray counts on this node")
    add("--num-gpus", metavar="N", type=_count, help="what Ray counts on this node")
    add("--object-store-memory", metavar="BYTES", type=_count, help="default min(30%% of RAM, 80%% of /dev/shm)")
    add("--dashboard", action="store_true", help="serve Ray's dashboard on the head, on loopback, port 8265 if free")
    add(
        "--dashboard-address",
        metavar="HOST:PORT",
        type=_address,
        default=_variable(variables, DASHBOARD, _address),
        help=f"serve it there; 0.0.0.0:8265 for all who reach the head and have the token [{DASHBOARD}]",
    )
    add("--ray-debugger-external", action="store_true", help="Ray's own: `ray debug` reaches breakpoints on all nodes")
    add("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_place(parser: argparse.ArgumentParser) -> None:
    """Options that say which nodes there are, and which of them this is."""
    add = parser.add_argument
    add("--hosts", type=_word, metavar="A,B,C", help=f"the nodes, the head first; gpu-[0-3] is understood [{HOSTS}]")
    add("--hostfile", type=_word, metavar="FILE", help=f"the nodes, one a line, the head first [{HOST_FILE}]")
    add("--nodes", type=_word, metavar="N", help=f"how many nodes there are, where nothing else says so [{NODES}]")
    add(
        "--node-rank", type=_word, metavar="N", help=f"which of them this is; else found by the host name [{NODE_RANK}]"
    )
    add("--head", type=_word, metavar="HOST", help=f"the first node, where nothing else names it [{HEAD}]")
    add("--hostname", type=_word, metavar="NAME", help="this node's own name; default what the system says")


def _options(parsed: argparse.Namespace, report_directory: str) -> Options:
    ray = RayOptions(
        cpus=parsed.num_cpus,
        gpus=parsed.num_gpus,
        object_store_memory=parsed.object_store_memory,
        dashboard=parsed.dashboard_address or (Dashboard() if parsed.dashboard else None),
        debugger_external=parsed.ray_debugger_external,
    )
    return Options(
        command=_command(parsed.words),
        control_port=parsed.control_port,
        deadline=parsed.deadline,
        grace=parsed.grace,
        warning_grace=parsed.warning_grace,
        min_nodes=parsed.min_nodes,
        log_directory=Path(parsed.log_dir) if parsed.log_dir else None,
        preflight=not parsed.no_preflight,
        report_directory=Path(report_directory),
        ray=None if parsed.no_ray else ray,
    )


def _command(words: list[str]) -> tuple[str, ...]:
    if words in ([], ["--"]):
        raise UsageError("no command is given", _HOW_TO_RUN)
    first, *rest = words
    if first == "--":
        return tuple(rest)
    if first == "train":
        return (sys.executable, "-m", "trainer", "train", *rest)
    raise UsageError(f"{first!r} is not a command of launch", _HOW_TO_RUN)


def _variable(variables: Mapping[str, str], name: str, convert: Callable[[str], T]) -> T | None:
    text = variables.get(name)
    if not text:
        return None
    try:
        return convert(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name}: {error}") from error


def _word(text: str) -> str:
    """`--hosts "$HOSTS"` without HOSTS would make a job of each node."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> int:
    if (count := _count(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return count


def _port(text: str) -> int:
    port = _count(text)
    if not 1024 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1024 to 65535")
    return port


def _address(text: str) -> Dashboard:
    host, colon, port = text.rpartition(":")
    if not (host and colon):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, like 127.0.0.1:8265")
    return Dashboard(host.strip("[]"), _port(port))
