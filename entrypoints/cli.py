"""The `launch` command line. Nothing heavy is imported before it is known to be needed."""

import argparse
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

from entrypoints.environments import detect
from entrypoints.environments.explicit import HOSTS, NODE_RANK
from entrypoints.errors import LaunchError, UsageError
from entrypoints.explain import as_json, as_text, explain
from entrypoints.logs import report
from entrypoints.options import CONTROL_PORT, DEADLINE, Options, RayOptions
from entrypoints.versions import installed

_HOW_TO_RUN = "write `launch -- COMMAND ...` or `launch train KEY=VALUE ...`"

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
    said = {HOSTS: parsed.hosts, NODE_RANK: parsed.node_rank}
    variables = {**variables, **{name: value for name, value in said.items() if value is not None}}
    if parsed.words[:1] == ["explain"]:
        return _explain(parsed, variables)
    options = _options(parsed)
    from entrypoints.launch import launch  # asyncio alone would double the time of `launch explain`

    hostname = socket.gethostname()
    return launch(detect(variables, hostname), options, hostname, variables)


def _explain(parsed: argparse.Namespace, variables: Mapping[str, str]) -> int:
    parser = _Parser(prog="launch explain", description="Say what was detected and why.", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    as_document = parser.parse_args(parsed.words[1:]).json
    document = explain(detect(variables, socket.gethostname()), variables, parsed.control_port)
    sys.stdout.write((as_json if as_document else as_text)(document) + "\n")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see `{self.prog} --help`")


def _parser(variables: Mapping[str, str]) -> _Parser:
    parser = _Parser(
        prog="launch",
        usage="launch [options] -- COMMAND ...\n       launch [options] train KEY=VALUE ...\n"
        "       launch [options] explain [--json]",
        description="Find this job's other nodes, form one Ray cluster with them and run a command on its head. "
        "`train` is short for the trainer; `explain` shows what was detected and why, and does nothing.",
        epilog="An option can also be given by the variable in its brackets. Several nodes need a shared secret: "
        "SLIPWAY_TOKEN or SLIPWAY_TOKEN_FILE.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"launch {installed('slipway')}")
    add("--hosts", metavar="A,B,C", help=f"the nodes, the head first [{HOSTS}]")
    add("--node-rank", metavar="N", help=f"which of them this is; else found by the host name [{NODE_RANK}]")
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
    add("--no-ray", action="store_true", help="run the command without Ray")
    add("--num-cpus", metavar="N", type=_count, help="what Ray counts on this node")
    add("--num-gpus", metavar="N", type=_count, help="what Ray counts on this node")
    add("--object-store-memory", metavar="BYTES", type=_count, help="default min(30%% of RAM, 80%% of /dev/shm)")
    add("--dashboard", action="store_true", help="serve Ray's dashboard on the head, on loopback only")
    add("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _options(parsed: argparse.Namespace) -> Options:
    ray = RayOptions(
        cpus=parsed.num_cpus,
        gpus=parsed.num_gpus,
        object_store_memory=parsed.object_store_memory,
        dashboard=parsed.dashboard,
    )
    return Options(
        command=_command(parsed.words),
        control_port=parsed.control_port,
        deadline=parsed.deadline,
        grace=parsed.grace,
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


def _port(text: str) -> int:
    port = _count(text)
    if not 1024 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1024 to 65535")
    return port
