"""Runs an image as one or several nodes on this machine, along the same path as on a cluster."""

import contextlib
import logging
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import FrameType

from buildkit.errors import RunError
from buildkit.host.accelerators import Flag
from buildkit.host.machine import Machine, read_machine
from buildkit.running.engine import ContainerEngine
from buildkit.running.flags import RunRequest, check_volumes, container_flags

log = logging.getLogger(__name__)

FOLLOW_TIMEOUT = 60  # seconds for the other nodes to end after the head
TIMED_OUT = 124  # the status of timeout(1)
TAIL = 40  # lines of a failed worker that are shown


def run_nodes(
    engine: ContainerEngine,
    request: RunRequest,
    machine: Machine | None = None,
    output: int | None = None,
    limit: float | None = None,
) -> int:
    """Runs the command on `nodes` containers and returns its status; every container and network is gone afterwards.

    `output` is the file descriptor that gets the head's standard output, our own stdout when not given.
    A job that runs for more than `limit` seconds is killed, and its status is `TIMED_OUT`.
    Raises `RunError` when the image or a volume is missing or a container cannot be started.
    """
    if engine.find(request.image) is None:
        raise RunError(f"there is no image {request.image}", f"run `buildkit build --target {request.target}`")
    request = replace(request, volumes=check_volumes(request.volumes))
    commands = node_commands(engine, request, machine or read_machine())
    with contextlib.ExitStack() as stack:
        if request.nodes > 1:
            ask(engine, "network", "create", request.name)
            stack.callback(ask_quietly, engine, "network", "rm", request.name)
        containers = []
        for command in commands:
            containers.append(ask(engine, *command, environment={"SLIPWAY_TOKEN": request.token}))
            stack.callback(ask_quietly, engine, "rm", "--force", "--volumes", containers[-1])
        for container in reversed(containers[1:]):
            ask(engine, "start", container)
        stack.enter_context(signals_reach(engine, containers))
        return follow(engine, containers, output, limit, request.interactive)


def ending(status: int, limit: int) -> str:
    """The end of a job with this status, as a clause after "the run"."""
    return f"did not end within {limit} s" if status == TIMED_OUT else f"ended with status {status}"


def node_commands(
    engine: ContainerEngine | type[ContainerEngine], request: RunRequest, machine: Machine
) -> list[list[str]]:
    """The `create` command of each node, the head first. The token is not among its words but in the environment."""
    network = request.name if request.nodes > 1 else None
    commands = []
    for rank in range(request.nodes):
        flags = engine.flags((*container_flags(request, machine, network, rank), *node_flags(request, rank)), machine)
        words = [word for flag in flags if not flag.shell for word in flag.words]
        commands.append(["create", *words, request.image, *request.words()])
    return commands


def node_flags(request: RunRequest, rank: int) -> list[Flag]:
    """Flags that make a container a node of a job on this machine."""
    node = f"node{rank}"
    flags = [
        Flag("name", f"{request.name}-{node}", "to find it by"),
        Flag("hostname", node, "the node's name in the list of hosts"),
        Flag("label", f"dev.slipway.job={request.name}", "to find what belongs together"),
    ]
    if request.nodes > 1:
        hosts = ",".join(f"node{rank}" for rank in range(request.nodes))
        flags += [
            Flag("network-alias", node, "the name by which the others reach it"),
            Flag("env", f"SLIPWAY_HOSTS={hosts}", "the nodes, the head first"),
            Flag("env", "SLIPWAY_TOKEN", "the secret that authenticates the nodes"),
        ]
    if rank == 0 and request.interactive:
        flags.append(Flag("interactive", "", "your input reaches the command"))
    if rank == 0 and sys.stdout.isatty() and (sys.stdin.isatty() or not request.interactive):
        flags += [Flag("tty", "", "your terminal"), Flag("env", "TERM", "your terminal's kind")]
    return flags


def dry_run(engine: type[ContainerEngine], request: RunRequest, machine: Machine) -> str:
    """The command lines of a run."""
    lines = [["network", "create", request.name]] if request.nodes > 1 else []
    lines += node_commands(engine, request, machine)
    lines += [["start", f"{request.name}-node{rank}"] for rank in reversed(range(1, request.nodes))]
    interactive = ["--interactive"] if request.interactive else []
    lines.append(["start", "--attach", *interactive, f"{request.name}-node0"])
    return "".join(shlex.join([engine.name, *line]) + "\n" for line in lines)


def ask(engine: ContainerEngine, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """The engine's answer. Raises `RunError` with the engine's message when it refuses."""
    done = engine.call(*arguments, environment=environment)
    if done.returncode != 0:
        words = done.stderr.strip() or f"status {done.returncode}"
        raise RunError(
            f"{engine.name} {arguments[0]} failed: {words}", f"see the message; `{engine.name} info` shows its state"
        )
    return done.stdout.strip()


def ask_quietly(engine: ContainerEngine, *arguments: str) -> None:
    """Cleans up: a container or network that is already gone is no error."""
    done = engine.call(*arguments)
    if done.returncode != 0:
        log.debug("%s: %s", " ".join(arguments), done.stderr.strip())


@contextlib.contextmanager
def signals_reach(engine: ContainerEngine, containers: list[str]) -> Iterator[None]:
    """SIGINT and SIGTERM stop the head gracefully, which ends the job on every node; a second signal kills."""
    received = 0

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        sent = "SIGTERM" if received == 1 else "SIGKILL"
        advice = "; once more kills it" if received == 1 else ""
        log.warning("%s: sending %s to the job%s", signal.Signals(number).name, sent, advice)
        for container in containers[:1] if received == 1 else containers:
            ask_quietly(engine, "kill", "--signal", sent, container)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(
    engine: ContainerEngine, containers: list[str], output: int | None, limit: float | None, interactive: bool
) -> int:
    """Starts the head, copies its output to ours until it ends, and waits for the others."""
    head, *workers = containers
    start = [*engine.program, "start", "--attach", *(["--interactive"] if interactive else []), head]
    # In its own session, so that Ctrl-C reaches only this process; but only the terminal's own session sees its keys.
    attached = subprocess.Popen(start, stdout=output, start_new_session=not (interactive and sys.stdin.isatty()))
    try:
        ended = attached.wait(limit)
    except subprocess.TimeoutExpired:
        for container in containers:
            ask_quietly(engine, "kill", container)
        attached.wait()
        return TIMED_OUT
    status = int(ask(engine, "wait", head))
    if ended != 0 and status == 0:
        raise RunError(f"{engine.name} could not start the container", "see its message above")
    deadline = time.monotonic() + FOLLOW_TIMEOUT
    for rank, worker in enumerate(workers, start=1):
        other = wait_until(engine, worker, deadline)
        if other != status:
            log.error("node%d ended with %s, the head with %d; its last lines:", rank, other, status)
            logs = engine.call("logs", "--tail", str(TAIL), worker)
            sys.stderr.write(logs.stdout + logs.stderr)
    return status


def wait_until(engine: ContainerEngine, container: str, deadline: float) -> int | str:
    """The container's exit status, or a message when it was killed because it did not end in time."""
    try:
        return int(engine.call("wait", container, timeout=max(1.0, deadline - time.monotonic())).stdout)
    except (subprocess.TimeoutExpired, ValueError):
        ask_quietly(engine, "kill", container)
        return f"no status within {FOLLOW_TIMEOUT} s"
