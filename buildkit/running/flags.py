"""The flags of `docker run` that a job needs, each with its value and its reason.

`buildkit run`, its `--explain` and the formats for other runtimes (formats.py) all start from this list. It never
contains `--privileged`: GPUs and InfiniBand need only the devices and capabilities below.
"""

import os
import re
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

from buildkit.errors import RunError, UsageError
from buildkit.host.accelerators import ACCELERATORS, TRACE, Devices, Flag
from buildkit.host.machine import Machine
from buildkit.host.shared_memory import shm_size
from buildkit.running.accounts import HUB, HUB_VARIABLE

OPEN_FILES = 2**20
STOP_SECONDS = 120  # from SIGTERM to SIGKILL: time to write a checkpoint
LAUNCH_SECONDS = 10  # of these, for `launch` to stop Ray and itself
LAUNCH_COMMANDS = ("train", "explain", "hosts", "attach", "preflight", "environments")  # any other word is a program
RESULTS = "/runs"  # where `--output` is mounted
GPUS_ASSUMED = 8  # per node, if this machine has none


@dataclass(frozen=True)
class RunRequest:
    """A job. `volumes`, `environment` and `published` are written as in docker; `shm_bytes` and `gpus` are per node.

    `interactive` connects this terminal, or what is piped into us, to the head. `cache` is the host's folder for what
    comes from the Hugging Face Hub, and `accounts` are the user's variables that containers get by name.
    """

    image: str
    target: str
    command: tuple[str, ...]
    nodes: int = 1
    volumes: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    cache: str = ""
    accounts: tuple[Flag, ...] = ()
    interactive: bool = False
    user: str | None = None
    shm_bytes: int | None = None
    gpus: int | None = None
    debug: bool = False
    name: str = field(default_factory=lambda: new_job_name())
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    @property
    def mounts(self) -> tuple[str, ...]:
        """The volumes, and that of the cache."""
        return (*self.volumes, f"{self.cache}:{HUB}") if self.cache else self.volumes

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment, and the cache's place in it."""
        return (*self.environment, f"{HUB_VARIABLE}={HUB}") if self.cache else self.environment

    @property
    def is_program(self) -> bool:
        """Whether the command is a program of the image, which runs as it is and without a cluster."""
        return not self.command[0].startswith("-") and self.command[0] not in LAUNCH_COMMANDS

    def words(self, seconds: int = STOP_SECONDS) -> tuple[str, ...]:
        """The entrypoint's arguments: the command, with most of the `seconds` before SIGKILL as its grace period.

        A program is not `launch`'s to end. A `--grace` of the user comes later, and counts.
        """
        if self.is_program:
            return self.command
        return ("--grace", str(max(seconds - LAUNCH_SECONDS, 5)), *self.command)


def new_job_name() -> str:
    return f"slipway-{secrets.token_hex(4)}"


def check_volumes(volumes: tuple[str, ...]) -> tuple[str, ...]:
    """Volumes with absolute host paths. A missing path raises `RunError`, where docker creates an empty folder."""
    checked = []
    for volume in volumes:
        source, _, rest = volume.partition(":")
        path = Path(source).resolve()
        if not rest or not os.access(path, os.R_OK):
            problem = (
                "the folder in the container is missing" if not rest else f"{path} does not exist or is not readable"
            )
            raise RunError(f"--volume {volume}: {problem}", "write HOST:CONTAINER[:ro], with a host path that exists")
        checked.append(f"{path}:{rest}")
    return tuple(checked)


def assume(
    machine: Machine, target: str, gpus: int | None = None, memory: int | None = None, fabric: str | None = None
) -> Machine:
    """The machine, changed to match the nodes on which the job will run. Raises `UsageError`."""
    accelerator = ACCELERATORS[target]
    if gpus is not None:
        if not accelerator.has_gpus:
            others = " or ".join(name for name, row in ACCELERATORS.items() if row.has_gpus)
            raise UsageError(f"--gpus: target {target} uses none", f"leave it out, or choose --target {others}")
        here = machine.gpus[target]
        names = (here.architectures or (accelerator.assumed_architecture,))[:1] * gpus
        assumed = replace(here, count=gpus, architectures=names if names[0] else ())
        machine = replace(machine, gpus={**machine.gpus, target: assumed})
    if memory is not None:
        machine = replace(machine, ram_bytes=memory)
    if fabric is not None:
        machine = replace(machine, fabric=fabric, rdma_devices=fabric != "ethernet")
    return machine


def container_flags(
    request: RunRequest, machine: Machine, network: str | None = "host", rank: int = 0
) -> tuple[Flag, ...]:
    """The flags of node `rank`. With the host's network a node has the machine to itself, else all nodes share it.

    With `network` None the engine uses its default network.
    """
    nodes_here = 1 if network == "host" else request.nodes
    memory = request.shm_bytes or shm_size(machine.ram_bytes, nodes_here)
    flags = [
        *accelerator_flags(request, machine, nodes_here, rank),
        *fabric_flags(machine, request.target),
        Flag("shm-size", str(memory), "Ray's object store (30 % of RAM) and NCCL's buffers; docker's default is 64 MB"),
        Flag("ulimit", f"nofile={min(OPEN_FILES, machine.open_files)}", "Ray keeps a socket to every worker process"),
        Flag("stop-timeout", str(STOP_SECONDS), "seconds between SIGTERM and SIGKILL, to write a checkpoint"),
    ]
    if network == "host":
        flags.append(
            Flag("network", "host", "Ray and NCCL use many ports between nodes, and RDMA uses the host's addresses")
        )
    elif network is not None:
        flags.append(Flag("network", network, "a network for the nodes of this job only"))
    if request.debug and not any(flag.value == TRACE for flag in flags):
        flags.append(Flag("cap-add", TRACE, "debuggers attach to other processes in the container"))
    if request.user:
        flags.append(Flag("user", request.user, "files that the job writes belong to you"))
    flags += [Flag("volume", volume, reason(volume, request.volumes)) for volume in request.mounts]
    flags += [Flag("publish", ports, "asked for") for ports in request.published if rank == 0]
    flags += [Flag("env", variable, reason(variable, request.environment)) for variable in request.variables]
    return (*flags, *request.accounts)


def reason(value: str, asked: tuple[str, ...]) -> str:
    return "asked for" if value in asked else "what comes from the Hugging Face Hub outlives the container"


def accelerator_flags(request: RunRequest, machine: Machine, nodes: int, rank: int) -> list[Flag]:
    accelerator = ACCELERATORS[request.target]
    count = len(machine.render_nodes) if accelerator.render_nodes else machine.gpus[request.target].count
    chosen = share(count, request.gpus, nodes, rank)
    return accelerator.flags(Devices(chosen, machine.render_nodes, machine.device_groups))


def share(count: int, wanted: int | None, nodes: int, rank: int) -> tuple[int, ...] | None:
    """The GPUs of node `rank` when `nodes` share this machine's `count`, or each has the `wanted` ones.

    None means all, or too few to share.
    """
    each = wanted or count // nodes
    if not wanted and each in (0, count):
        return None
    return tuple(range(rank * each, (rank + 1) * each))


def refuse_absent_gpus(request: RunRequest, machine: Machine) -> None:
    """Raises `RunError` if the nodes together need more GPUs than this machine has."""
    count, wanted = machine.gpus[request.target].count, (request.gpus or 0) * request.nodes
    if 0 < count < wanted:
        raise RunError(
            f"{request.nodes} node(s) with {request.gpus} GPUs each need {wanted}, and this machine has {count}",
            "ask for fewer, or print the job for other machines: --print docker, kubernetes, …",
        )


def fabric_flags(machine: Machine, target: str) -> list[Flag]:
    if not ACCELERATORS[target].has_gpus or not machine.rdma_devices:
        return []
    flags = [
        Flag("device", "/dev/infiniband", "the RDMA adapters; without them NCCL falls back to TCP"),
        Flag("cap-add", "IPC_LOCK", "RDMA registers memory, which must stay in RAM"),
    ]
    if machine.gdrcopy:
        flags.append(
            Flag("device", "/dev/gdrdrv", "GDRCopy: small copies to the GPU, if libgdrapi is added to the image")
        )
    return flags


def caller() -> str:
    return f"{os.getuid()}:{os.getgid()}"


def checked_user(text: str) -> str:
    """The uid and gid of `--user`; the gid is 0 if there is none, as in docker. Raises `UsageError` for a name."""
    uid, _, gid = text.partition(":")
    numbers = [uid, gid or "0"] if not text.endswith(":") else [uid, ""]
    if not all(re.fullmatch(r"[0-9]{1,10}", number) and int(number) < 2**31 for number in numbers):
        raise UsageError(
            f"--user {text}: not numbers", "the image has no users of yours: write UID:GID, as `id -u` and `id -g` say"
        )
    return ":".join(str(int(number)) for number in numbers)
