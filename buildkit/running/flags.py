"""What a container of ours needs from its host, as data: each flag of `docker run` with its value and its reason.

One list serves all: what `buildkit run` starts, what it prints for other runtimes (formats.py), what `--explain` shows.
No flag is ever `--privileged`: the devices and capabilities below are all that GPUs and InfiniBand need.
"""

import os
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

from buildkit.errors import RunError, UsageError
from buildkit.host.accelerators import ACCELERATORS, TRACE, Devices, Flag
from buildkit.host.machine import Machine
from buildkit.host.shared_memory import shm_size

OPEN_FILES = 2**20
STOP_SECONDS = 120  # from SIGTERM to SIGKILL: a checkpoint must fit in
LAUNCH_SECONDS = 10  # of them, for `launch` to end Ray and itself
GPUS_ASSUMED = 8  # of a node that is not this one


@dataclass(frozen=True)
class RunRequest:
    """What is to run. `volumes` and `environment` are in docker's own notation; `shm_bytes` and `gpus` are per node."""

    image: str
    target: str
    command: tuple[str, ...]
    nodes: int = 1
    volumes: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    user: str | None = None
    shm_bytes: int | None = None
    gpus: int | None = None
    debug: bool = False
    name: str = field(default_factory=lambda: new_job_name())
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def words(self, seconds: int = STOP_SECONDS) -> tuple[str, ...]:
        """What the entrypoint gets: the command, with nearly all of the `seconds` between SIGTERM and SIGKILL."""
        if "--grace" in self.command:
            return self.command
        return ("--grace", str(max(seconds - LAUNCH_SECONDS, 5)), *self.command)


def new_job_name() -> str:
    return f"slipway-{secrets.token_hex(4)}"


def check_volumes(volumes: tuple[str, ...]) -> tuple[str, ...]:
    """Volumes with absolute host paths. Docker would make a missing one as an empty folder; here it is an error."""
    checked = []
    for volume in volumes:
        source, _, rest = volume.partition(":")
        path = Path(source).resolve()
        if not rest or not os.access(path, os.R_OK):
            problem = "it names no folder in the container" if not rest else f"{path} is not there or not readable"
            raise RunError(f"--volume {volume}: {problem}", "write HOST:CONTAINER[:ro], with a host path that exists")
        checked.append(f"{path}:{rest}")
    return tuple(checked)


def assume(
    machine: Machine, target: str, gpus: int | None = None, memory: int | None = None, fabric: str | None = None
) -> Machine:
    """The machine with what is said about the nodes on which the job will really run; raises `UsageError`."""
    accelerator = ACCELERATORS[target]
    if gpus is not None:
        if not accelerator.has_gpus:
            others = " or ".join(name for name, row in ACCELERATORS.items() if row.has_gpus)
            raise UsageError(f"--gpus: target {target} uses none", f"leave it out, or choose --target {others}")
        here = machine.gpus[target]
        names = (here.architectures or (accelerator.assumed_architecture,))[:1] * gpus
        assumed = replace(here, count=gpus, architectures=names if names[0] else ())
        machine = replace(machine, gpus={**machine.gpus, target: assumed})
        if accelerator.render_nodes:
            nodes = tuple(f"/dev/dri/renderD{128 + index}" for index in range(gpus))
            machine = replace(machine, render_nodes=nodes)
    if memory is not None:
        machine = replace(machine, ram_bytes=memory)
    if fabric is not None:
        machine = replace(machine, fabric=fabric, rdma_devices=fabric != "ethernet")
    return machine


def container_flags(
    request: RunRequest, machine: Machine, network: str | None = "host", rank: int = 0
) -> tuple[Flag, ...]:
    """Everything that node `rank` needs. With the host's network a node has the machine for itself, otherwise the nodes
    share it; `network` None leaves the engine's own default."""
    nodes_here = 1 if network == "host" else request.nodes
    memory = request.shm_bytes or shm_size(machine.ram_bytes, nodes_here)
    flags = [
        *accelerator_flags(request, machine, nodes_here, rank),
        *fabric_flags(machine, request.target),
        Flag("shm-size", str(memory), "Ray's object store (30 % of RAM) and NCCL's buffers; docker gives 64 MB"),
        Flag("ulimit", f"nofile={min(OPEN_FILES, machine.open_files)}", "Ray holds a socket to every worker process"),
        Flag("stop-timeout", str(STOP_SECONDS), "seconds to write a checkpoint between SIGTERM and SIGKILL"),
    ]
    if network == "host":
        flags.append(
            Flag("network", "host", "Ray and NCCL use many ports between nodes, RDMA the host's own addresses")
        )
    elif network is not None:
        flags.append(Flag("network", network, "the nodes of this job see each other and nobody else"))
    if request.debug and not any(flag.value == TRACE for flag in flags):
        flags.append(Flag("cap-add", TRACE, "debuggers look into other processes of the container"))
    if request.user:
        flags.append(Flag("user", request.user, "what the job writes belongs to you"))
    flags += [Flag("volume", volume, "asked for") for volume in request.volumes]
    flags += [Flag("env", variable, "asked for") for variable in request.environment]
    return tuple(flags)


def accelerator_flags(request: RunRequest, machine: Machine, nodes: int, rank: int) -> list[Flag]:
    accelerator = ACCELERATORS[request.target]
    count = len(machine.render_nodes) if accelerator.render_nodes else machine.gpus[request.target].count
    chosen = share(count, request.gpus, nodes, rank)
    return accelerator.flags(Devices(chosen, machine.render_nodes, machine.device_groups))


def share(count: int, wanted: int | None, nodes: int, rank: int) -> tuple[int, ...] | None:
    """The GPUs of node `rank` when `nodes` share this machine's `count`; None for all, also when they are too few."""
    each = wanted if wanted is not None else count // nodes
    if each == 0 or each * nodes > count or each == count:
        return None
    return tuple(range(rank * each, (rank + 1) * each))


def fabric_flags(machine: Machine, target: str) -> list[Flag]:
    if not ACCELERATORS[target].has_gpus or not machine.rdma_devices:
        return []
    flags = [
        Flag("device", "/dev/infiniband", "the RDMA adapters; without them NCCL falls back to TCP sockets"),
        Flag("cap-add", "IPC_LOCK", "RDMA registers memory that must stay in RAM"),
    ]
    if machine.gdrcopy:
        flags.append(Flag("device", "/dev/gdrdrv", "GDRCopy: small copies to the GPU without a kernel launch"))
    return flags


def caller() -> str:
    return f"{os.getuid()}:{os.getgid()}"
