"""Runs an image as one or several nodes on this machine: the same launch path that a cluster takes."""

import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from docker.errors import APIError, NotFound
from docker.models.containers import Container
from docker.models.networks import Network
from docker.types import DeviceRequest, Ulimit

from buildkit.engine import Engine
from buildkit.errors import RunError

log = logging.getLogger(__name__)

STOP_TIMEOUT = 15  # seconds from SIGTERM to SIGKILL
FOLLOW_TIMEOUT = 60  # seconds in which the other nodes must end once the head has
TAIL = 40  # lines of a failed worker that are shown


@dataclass(frozen=True)
class RunRequest:
    """`volumes` and `environment` are in docker's own notation; `shm_bytes` is per node."""

    image: str
    target: str
    command: tuple[str, ...]
    nodes: int = 1
    volumes: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    user: str | None = None
    shm_bytes: int | None = None
    name: str = field(default_factory=lambda: new_job_name())
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)


def check_volumes(volumes: tuple[str, ...]) -> tuple[str, ...]:
    """Volumes with absolute host paths. Docker would make a missing one as an empty folder; here it is an error."""
    checked = []
    for volume in volumes:
        source, _, rest = volume.partition(":")
        path = Path(source).resolve()
        if not rest or not path.exists():
            problem = "it names no folder in the container" if not rest else f"{path} does not exist"
            raise RunError(f"--volume {volume}: {problem}", "write HOST:CONTAINER[:ro], with a host path that exists")
        checked.append(f"{path}:{rest}")
    return tuple(checked)


def new_job_name() -> str:
    return f"slipway-{secrets.token_hex(4)}"


def default_shm_bytes(nodes: int) -> int:
    """Shared memory of a node: 30 % of the machine's RAM shared out for Ray's object store, and 1 GiB for NCCL.

    Docker's own 64 MB makes NCCL fail and Ray spill to disk.
    """
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(0.3 * ram / nodes) + 2**30


def accelerator_options(target: str) -> dict[str, Any]:
    """What the engine must hand in so that the container sees its GPUs and may pin memory for them."""
    limits = [Ulimit(name="memlock", soft=-1, hard=-1), Ulimit(name="stack", soft=2**26, hard=2**26)]
    if target == "cuda":
        return {"ulimits": limits, "device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])]}
    if target == "rocm":
        groups = [str(path.stat().st_gid) for path in Path("/dev/dri").glob("renderD*")]
        devices = ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"]
        return {"ulimits": limits, "devices": devices, "group_add": ["video", *dict.fromkeys(groups)]}
    return {}


def run_nodes(engine: Engine, request: RunRequest) -> int:
    """Runs the command on `nodes` containers and returns its status; every container and network is gone afterwards.

    Raises `RunError` when the image or a volume is missing or a container cannot be started.
    """
    if engine.find(request.image) is None:
        raise RunError(f"there is no image {request.image}", f"run `buildkit build --target {request.target}`")
    request = replace(request, volumes=check_volumes(request.volumes))
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(job_network(engine, request)) if request.nodes > 1 else None
            containers = [create(engine, request, rank, network, stack) for rank in range(request.nodes)]
            for container in reversed(containers[1:]):
                container.start()
            stack.enter_context(signals_reach(containers))
            return follow(containers)
        except APIError as error:
            raise RunError(
                f"the engine refused: {error.explanation}", "see the message; `docker info` shows its state"
            ) from error


@contextlib.contextmanager
def job_network(engine: Engine, request: RunRequest) -> Iterator[Network]:
    network = engine.client.networks.create(request.name, driver="bridge")
    try:
        yield network
    finally:
        network.remove()


def create(
    engine: Engine, request: RunRequest, rank: int, network: Network | None, stack: contextlib.ExitStack
) -> Container:
    node = f"node{rank}"
    environment = list(request.environment)
    options: dict[str, Any] = {}
    if network is not None:
        environment += [f"SLIPWAY_HOSTS={','.join(f'node{rank}' for rank in range(request.nodes))}"]
        environment += [f"SLIPWAY_TOKEN={request.token}"]
        endpoint = engine.client.api.create_endpoint_config(aliases=[node])
        options = {"network": network.name, "networking_config": {network.name: endpoint}}
    interactive = rank == 0 and sys.stdout.isatty()
    if interactive:
        environment += [f"TERM={os.environ.get('TERM', 'xterm-256color')}"]
    container = engine.client.containers.create(
        request.image,
        list(request.command),
        name=f"{request.name}-{node}",
        hostname=node,
        environment=environment,
        volumes=list(request.volumes),
        user=request.user,
        shm_size=request.shm_bytes or default_shm_bytes(request.nodes),
        labels={"dev.slipway.job": request.name},
        tty=interactive,
        **options,
        **accelerator_options(request.target),
    )
    stack.callback(remove, container)
    return container


def remove(container: Container) -> None:
    with contextlib.suppress(NotFound):
        container.remove(force=True)


@contextlib.contextmanager
def signals_reach(containers: list[Container]) -> Iterator[None]:
    """SIGINT and SIGTERM stop the head in order, which ends the job on every node; a second one kills."""
    received = 0

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        sent = "SIGTERM" if received == 1 else "SIGKILL"
        log.warning("%s: sending %s to the job", signal.Signals(number).name, sent)
        for container in containers[:1] if received == 1 else containers:
            with contextlib.suppress(APIError):
                container.kill(sent)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(containers: list[Container]) -> int:
    """Starts the head, copies its output to ours until it ends, and waits for the others."""
    head, *workers = containers
    output = head.attach(stream=True, logs=True, stdout=True, stderr=True)
    head.start()
    if sys.stdout.isatty():
        size = os.get_terminal_size()
        head.resize(size.lines, size.columns)
    copier = threading.Thread(target=copy, args=(output,), daemon=True)
    copier.start()
    status = int(head.wait()["StatusCode"])
    copier.join(timeout=5)
    deadline = time.monotonic() + FOLLOW_TIMEOUT
    for worker in workers:
        other = wait_until(worker, deadline)
        if other != status:
            log.error("%s ended with %s, the head with %d; its last lines:", worker.name, other, status)
            sys.stderr.write(worker.logs(tail=TAIL).decode(errors="replace"))
    return status


def wait_until(container: Container, deadline: float) -> int | str:
    """The container's status, or words when it did not end in time and was killed."""
    try:
        return int(container.wait(timeout=max(1, int(deadline - time.monotonic())))["StatusCode"])
    except (OSError, ValueError):  # requests' time-outs are OSErrors
        with contextlib.suppress(APIError):
            container.kill()
        return f"no status within {FOLLOW_TIMEOUT} s"


def copy(output: Iterator[bytes]) -> None:
    for chunk in output:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
