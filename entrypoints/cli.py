"""The `launch` command line. Heavy modules are imported only by what needs them."""

import argparse
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from entrypoints.commands import attach, environments, explain, hosts, preflight, write
from entrypoints.environments.explicit import HEAD, HOST_FILE, HOSTS, NODE_RANK, NODES, SINGLE
from entrypoints.errors import LaunchError, UsageError, did_you_mean
from entrypoints.host.settings import read_manifest
from entrypoints.host.tree import Tree
from entrypoints.host.versions import slipway_version
from entrypoints.known_variables import refuse_unknown
from entrypoints.logs import report
from entrypoints.options import (
    CONTROL_PORT,
    DASHBOARD,
    DEADLINE,
    LOG_DIR,
    MAX_RESTARTS,
    MIN_NODES,
    REPORT_DIR,
    SPARES,
    TLS,
    Dashboard,
    Options,
    RayOptions,
)
from entrypoints.program import run_program
from entrypoints.streams import say

_HOW_TO_RUN = "write `launch -- COMMAND ...` or `launch train KEY=VALUE ...`"
_VARIABLES = {"hosts": HOSTS, "hostfile": HOST_FILE, "node_rank": NODE_RANK, "nodes": NODES, "head": HEAD}
"""Options that set a variable, so that every environment can read it."""

SUBCOMMANDS = {
    "explain": explain.SUBCOMMAND,
    "hosts": hosts.SUBCOMMAND,
    "attach": attach.SUBCOMMAND,
    "preflight": preflight.SUBCOMMAND,
    "environments": environments.SUBCOMMAND,
}
COMMANDS = ("train", *SUBCOMMANDS)
"""The first words that belong to `launch`. Any other first word is a program of the image."""

_UNKNOWN_OPTION = re.compile(r"unrecognized arguments: (-[^\s=]+)")
_RAYS_OWN = {"CPU": "--num-cpus", "GPU": "--num-gpus", "object_store_memory": "--object-store-memory"}

T = TypeVar("T")


def main(arguments: Sequence[str]) -> int:
    """Run `launch`. Returns its exit status; `errors` lists them."""
    try:
        return _main(list(arguments), os.environ)
    except LaunchError as error:
        report(error)
        return error.exit_code
    finally:
        say()


def _main(arguments: list[str], variables: Mapping[str, str]) -> int:
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        run_program(arguments, COMMANDS, variables)
    main_parser = _parser(variables)
    parsed = main_parser.parse_args(arguments)
    refuse_unknown(variables)
    if parsed.words[:1] and parsed.words[0] in SUBCOMMANDS:
        subcommand = SUBCOMMANDS[parsed.words[0]]
        parser = Parser(prog=f"launch {parsed.words[0]}", description=subcommand.purpose, allow_abbrev=False)
        parser.above = main_parser
        _add_node_options(parser)
        subcommand.add_arguments(parser)
        rest, parsed.words = parsed.words[1:], []
        parsed = parser.parse_args(rest, parsed)
        result = subcommand.run(parsed, _with_options(variables, parsed))
        if isinstance(result, int):
            return result
        parsed.words = ["--", *result]
    options = _options(parsed, variables.get(REPORT_DIR) or ".")
    from entrypoints.job.guard import guarded  # asyncio alone would double the time of `launch explain`
    from entrypoints.job.launch import launch, locate

    variables = _with_options(variables, parsed)
    hostname = parsed.hostname or socket.gethostname()
    return guarded(lambda: launch(locate(variables, hostname, options.deadline), options, hostname, variables))


def _with_options(variables: Mapping[str, str], parsed: argparse.Namespace) -> dict[str, str]:
    """The variables, overridden by the options that stand for some of them."""
    given = {name: getattr(parsed, option) for option, name in _VARIABLES.items()}
    given[SINGLE] = "1" if parsed.single else None
    return {**variables, **{name: value for name, value in given.items() if value is not None}}


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of exiting."""

    def print_help(self, file: object = None) -> None:  # noqa: ARG002
        write(self.format_help())

    above: "Parser | None" = None
    """The parser of `launch`, for that of a subcommand."""

    def error(self, message: str) -> NoReturn:
        hint = f"see `{self.prog} --help`"
        if match := _UNKNOWN_OPTION.match(message):
            if self.above is not None and match[1] in self.above._option_string_actions:
                hint = f"write it before the subcommand: {self.above.prog} {match[1]} ..."
            else:
                hint = did_you_mean(match[1], self._option_string_actions) + hint
        raise UsageError(message, hint)


class _ShowVersion(argparse.Action):
    """Reads the version only when asked for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        write(f"launch {slipway_version(read_manifest(Tree())) or 'of unknown version'}")
        parser.exit()


def _parser(variables: Mapping[str, str]) -> Parser:
    parser = Parser(
        prog="launch",
        usage="launch [options] -- COMMAND ...\n       launch [options] train KEY=VALUE ...\n"
        + "".join(f"       launch [options] {name} ...\n" for name in SUBCOMMANDS)
        + "       launch PROGRAM ...\n",
        description="Find this job's other nodes, form one Ray cluster with them and run a command on the head. "
        "`train` starts the trainer. A PROGRAM on the PATH, like bash, runs as it is, without a cluster. "
        + " ".join(f"`{name}`: {subcommand.purpose}" for name, subcommand in SUBCOMMANDS.items()),
        epilog="The variable in brackets sets the same option. Several nodes need a shared secret: SLIPWAY_TOKEN or "
        "SLIPWAY_TOKEN_FILE.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action=_ShowVersion, nargs=0, help="print the version and exit")
    _add_node_options(parser)
    add(
        "--deadline",
        metavar="SECONDS",
        type=_seconds,
        default=_variable(variables, DEADLINE, _seconds) or 300.0,
        help=f"time to form the cluster; default: 300 [{DEADLINE}]",
    )
    add(
        "--control-port",
        metavar="PORT",
        type=_port,
        default=_variable(variables, CONTROL_PORT, _port),
        help=f"port on which the head listens, equal on all nodes; default: derived from the job id [{CONTROL_PORT}]",
    )
    add("--grace", metavar="SECONDS", type=_seconds, default=5.0, help="time between SIGTERM and SIGKILL; default: 5")
    add(
        "--warning-grace",
        metavar="SECONDS",
        type=_seconds,
        default=120.0,
        help="the same after SIGUSR1 or SIGUSR2; default: 120",
    )
    add(
        "--min-nodes",
        metavar="N",
        type=_positive,
        default=_variable(variables, MIN_NODES, _positive),
        help=f"continue with at least N nodes; when a node is lost, restart the command on the others [{MIN_NODES}]",
    )
    add(
        "--spares",
        metavar="K",
        type=_count,
        default=_variable(variables, SPARES, _count) or 0,
        help=f"keep K of the nodes waiting; one takes the place of a lost node, and the command restarts [{SPARES}]",
    )
    add(
        "--max-restarts",
        metavar="N",
        type=_count,
        default=_variable(variables, MAX_RESTARTS, _count) or 0,
        help="start the command again, at most N times, if it fails with any status but 2; default: 0 "
        f"[{MAX_RESTARTS}]",
    )
    add(
        "--log-dir",
        metavar="DIR",
        default=variables.get(LOG_DIR),
        help=f"keep the logs of every node in DIR [{LOG_DIR}]",
    )
    add(
        "--tls",
        action="store_true",
        default=_variable(variables, TLS, _switch) or False,
        help=f"encrypt Ray's traffic between the nodes, with certificates made for this job [{TLS}=1]",
    )
    add("--no-preflight", action="store_true", help="join even if the checks of this node fail")
    add("--no-ray", action="store_true", help="run the command without Ray; a single node also skips its checks")
    add(
        "--num-cpus",
        metavar="N",
        type=_count,
        help="CPUs that Ray may use on this node; default: those of this process's affinity and control group",
    )
    add(
        "--num-gpus",
        metavar="N",
        type=_count,
        help="GPUs that Ray may use on this node; default: all. 0 on the head: it drives the job only",
    )
    add(
        "--object-store-memory",
        metavar="BYTES",
        type=_count,
        help="size of Ray's object store; default: min(30%% of RAM, 80%% of /dev/shm)",
    )
    add("--resources", metavar="JSON", type=_resources, help='more of this node\'s resources: {"SLOT": 2}')
    add(
        "--labels",
        metavar="KEY=VALUE,...",
        type=_labels,
        help="labels of this node, by which Ray places actors: rack=r7,nvlink-domain=3; Slurm's topology and NVIDIA's "
        "driver set these two by themselves",
    )
    add("--dashboard", action="store_true", help="serve Ray's dashboard on the head, on loopback, on port 8265 if free")
    add(
        "--dashboard-address",
        metavar="HOST:PORT",
        type=_address,
        default=_variable(variables, DASHBOARD, _address),
        help=f"serve the dashboard there; 0.0.0.0:8265 serves everyone who has the token [{DASHBOARD}]",
    )
    add(
        "--ray-debugger-external",
        action="store_true",
        help="let `ray debug` reach breakpoints on all nodes (Ray's option)",
    )
    add("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_node_options(parser: argparse.ArgumentParser) -> None:
    """Options that tell the job's nodes, and which of them this is."""
    add = parser.add_argument
    add(
        "--hosts",
        type=_word,
        metavar="A,B,C",
        help=f"the nodes, the head first; also as a host list: gpu-[0-3] [{HOSTS}]",
    )
    add("--hostfile", type=_word, metavar="FILE", help=f"a file with one node per line, the head first [{HOST_FILE}]")
    add("--nodes", type=_word, metavar="N", help=f"number of nodes, if the environment does not tell it [{NODES}]")
    add(
        "--node-rank", type=_word, metavar="N", help=f"rank of this node; default: found by its host name [{NODE_RANK}]"
    )
    add("--head", type=_word, metavar="HOST", help=f"the first node, if the environment does not name it [{HEAD}]")
    add("--single", action="store_true", help=f"run on this node alone, whatever a scheduler says [{SINGLE}=1]")
    add("--hostname", type=_word, metavar="NAME", help="name of this node; default: its host name")


def _options(parsed: argparse.Namespace, report_directory: str) -> Options:
    ray = RayOptions(
        cpus=parsed.num_cpus,
        gpus=parsed.num_gpus,
        object_store_memory=parsed.object_store_memory,
        resources=parsed.resources or "",
        labels=parsed.labels or "",
        dashboard=parsed.dashboard_address or (Dashboard() if parsed.dashboard else None),
        debugger_external=parsed.ray_debugger_external,
        tls=parsed.tls,
    )
    if parsed.tls and parsed.no_ray:
        raise UsageError("--tls encrypts Ray's traffic, but --no-ray starts no Ray", "leave out one of them")
    return Options(
        command=_command(parsed.words),
        waits_for_ray=parsed.words[:1] == ["train"],
        control_port=parsed.control_port,
        deadline=parsed.deadline,
        grace=parsed.grace,
        warning_grace=parsed.warning_grace,
        min_nodes=parsed.min_nodes,
        spares=parsed.spares,
        max_restarts=parsed.max_restarts,
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
        _check_not_shadowed(Path.cwd())
        return (sys.executable, "-P", "-m", "trainer", "train", *rest)  # -P: a user's json.py must not hide Python's
    raise UsageError(
        f"{first!r} after options is not a command of launch",
        f"{did_you_mean(first, COMMANDS, '`launch OPTIONS {} ...`')}write `launch OPTIONS -- {' '.join(words)}` to run "
        "it on the cluster, or leave out the options to run it without one",
    )


def _check_not_shadowed(directory: Path) -> None:
    """Raise UsageError if Ray's workers would import the user's `trainer`: they put the current directory first."""
    for module in (directory / "trainer.py", directory / "trainer" / "__init__.py"):
        if module.exists() and directory.resolve() != Path(__file__).resolve().parents[1]:
            raise UsageError(
                f"{module} hides the module `trainer` of the image",
                "rename it, or run the command from another directory",
            )


def _variable(variables: Mapping[str, str], name: str, convert: Callable[[str], T]) -> T | None:
    text = variables.get(name)
    if not text:
        return None
    try:
        return convert(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name}: {error}") from error


def _word(text: str) -> str:
    """Refuse an empty value: `--hosts "$HOSTS"` with HOSTS unset would make each node a job of its own."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty")
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


def _resources(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not all(
        type(amount) in (int, float) and amount >= 0 for amount in value.values()
    ):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object of amounts, like {{"SLOT": 2}}')
    if taken := sorted(_RAYS_OWN.keys() & value):
        raise argparse.ArgumentTypeError(f"{taken[0]} has an option of its own: {_RAYS_OWN[taken[0]]}")
    return text


def _labels(text: str) -> str:
    for label in text.split(","):
        if not re.fullmatch(r"[A-Za-z0-9._/-]+=[A-Za-z0-9._-]*", label):
            raise argparse.ArgumentTypeError(f"{label!r} is not KEY=VALUE, like rack=r7")
    return text


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 nor 1")
    return text == "1"


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
