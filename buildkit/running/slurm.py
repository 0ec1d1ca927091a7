"""Writes the batch script for Slurm: one task per node, a checkpoint before the time limit, then a requeue.

Scripts are usually written on a login node. So the script itself finds out on each compute node its RAM, the groups of
its GPU devices and whether it has RDMA adapters. Options: https://slurm.schedmd.com/sbatch.html.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from buildkit.errors import UsageError
from buildkit.host.accelerators import ACCELERATORS, Flag
from buildkit.host.machine import Machine
from buildkit.host.shared_memory import NCCL_SHM, OBJECT_STORE_LIMIT, OBJECT_STORE_SHARE, SHM_SHARE
from buildkit.running.accounts import HUB
from buildkit.running.flags import GPUS_ASSUMED, RESULTS, RunRequest
from buildkit.running.flags import container_flags as all_flags
from buildkit.running.formats import apptainer_flags, enroot_flags, image_file, podman_flags, templates

CONTAINERS = ("docker", "podman", "apptainer", "enroot", "pyxis", "none")
TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d(:\d\d)?)?|UNLIMITED")
WITH_FUNCTION = ("docker", "podman", "enroot")
FABRIC = ("/dev/infiniband", "IPC_LOCK", "/dev/gdrdrv")
PASSED_ON = ("SLURM", "SLURMD", "SLIPWAY")  # prefixes of the variables that containers get from their node
# The script finds these on the node.
ON_THE_NODE = ("shm-size", "group-add", "user", "network")


@dataclass(frozen=True)
class SlurmOptions:
    """The `#SBATCH` options, as `buildkit slurm` takes them; None leaves the cluster's default."""

    container: Annotated[str, typer.Option(help=f"Container runtime on the nodes: {', '.join(CONTAINERS)}.")] = "docker"
    time: Annotated[str | None, typer.Option(help="Time limit, like 12:00:00 or 3-00:00:00.")] = None
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None
    account: Annotated[str | None, typer.Option(help="Account.")] = None
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None
    constraint: Annotated[str | None, typer.Option(help="Features that nodes must have.")] = None
    nodelist: Annotated[str | None, typer.Option(help="Nodes to use, like gpu-[0,1].")] = None
    exclude: Annotated[str | None, typer.Option(help="Nodes to avoid.")] = None
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="CPUs per node.")] = None
    mem: Annotated[str, typer.Option(help="Memory per node; 0 means all of it.")] = "0"
    exclusive: Annotated[bool, typer.Option(help="Share the nodes with no other job.")] = True
    log: Annotated[str, typer.Option(help="File for the job's output.")] = "slurm-%j.out"
    warning: Annotated[
        int, typer.Option(min=1, help="Seconds before the time limit at which the job is asked to write a checkpoint.")
    ] = 120
    requeue: Annotated[bool, typer.Option(help="Requeue the job when its time is up.")] = True


def sbatch_options(request: RunRequest, machine: Machine, options: SlurmOptions) -> Iterator[tuple[str, str]]:
    """Name and value (empty for a switch) of each `#SBATCH` line."""
    yield "job-name", request.name
    yield "nodes", str(request.nodes)
    yield "ntasks-per-node", "1"
    if ACCELERATORS[request.target].has_gpus:
        yield "gpus-per-node", str(request.gpus or machine.gpus[request.target].count or GPUS_ASSUMED)
    if options.cpus_per_task:
        yield "cpus-per-task", str(options.cpus_per_task)
    yield "mem", options.mem
    if options.exclusive:
        yield "exclusive", ""
    for name in ("time", "partition", "account", "qos", "constraint", "nodelist", "exclude"):
        if value := getattr(options, name):
            yield name, value
    yield "output", options.log
    yield "open-mode", "append"
    yield "requeue" if options.requeue else "no-requeue", ""
    yield "signal", f"B:USR1@{options.warning}"


def slurm_text(request: RunRequest, machine: Machine, images: Path, options: SlurmOptions | None = None) -> str:
    """The batch script. Raises `UsageError` for an option that sbatch would refuse."""
    options = options or SlurmOptions()
    check(request, options)
    values = {
        "request": request,
        "accelerator": ACCELERATORS[request.target],
        "options": options,
        "sbatch": [
            f"--{name}={value}" if value else f"--{name}" for name, value in sbatch_options(request, machine, options)
        ],
        "node": node_function(request, machine, options),
        "shares_gpus": ACCELERATORS[request.target].has_gpus and not options.exclusive,
        "exported": request.variables if options.container in ("pyxis", "none") else (),
        "passed_on": PASSED_ON,
        "folders": [
            volume.rpartition(":")[0] for volume in request.mounts if volume.endswith((f":{RESULTS}", f":{HUB}"))
        ],
        "step": step_words(request, machine, options),
    }
    return templates(images).get_template("slurm.sh.j2").render(values)


def check(request: RunRequest, options: SlurmOptions) -> None:
    if options.container not in CONTAINERS:
        raise UsageError(f"--container {options.container}: unknown runtime", f"one of: {', '.join(CONTAINERS)}")
    if options.time and not TIME.fullmatch(options.time):
        raise UsageError(f"--time {options.time}: not a time for sbatch", "write 12:00:00, 3-00:00:00 or minutes")
    texts = [request.name, *(str(value) for value in vars(options).values() if isinstance(value, str))]
    if wrong := next((text for text in texts if re.search(r"\s", text)), None):
        raise UsageError(f"`{wrong}` contains a blank", "a value in an #SBATCH line ends at the first blank")


def fixed_flags(request: RunRequest, machine: Machine) -> tuple[Flag, ...]:
    """The flags that are the same on every node. Which GPUs the job gets is Slurm's choice."""
    flags = all_flags(replace(request, gpus=None), machine)
    return tuple(flag for flag in flags if flag.name not in ON_THE_NODE)


def node_function(request: RunRequest, machine: Machine, options: SlurmOptions) -> list[str]:
    """The flags in the shell function that starts the container; empty for runtimes without such a function."""
    container = options.container
    if container not in WITH_FUNCTION:
        return []
    flags = fixed_flags(request, machine)
    if not options.exclusive:
        flags = tuple(flag for flag in flags if flag.name != "gpus")
    if container == "enroot":
        return [line(flag) for flag in enroot_flags(flags)]
    if container == "podman":
        flags = podman_flags(flags, machine)
    lines = [line(flag) for flag in flags if flag.value not in FABRIC]
    rootless = container == "podman" and machine.rootless
    user = "--userns keep-id" if rootless else '--user "$(id -u):$(id -g)"'
    shm = str(request.shm_bytes) if request.shm_bytes else f"$({shm_expression()})"
    groups = ["--group-add keep-groups  # your groups own the GPU devices"]
    return [
        *lines,
        *(groups if rootless and ACCELERATORS[request.target].device_files else []),
        "--network host  # Ray and NCCL use many ports between nodes, and RDMA uses the host's addresses",
        f"{user}  # files that the job writes belong to you",
        f"--shm-size \"{shm}\"  # Ray's object store (30 % of RAM) and NCCL's buffers",
    ]


def line(flag: Flag) -> str:
    return f"{shlex.join(flag.words)}  # {flag.reason}"


def step_words(request: RunRequest, machine: Machine, options: SlurmOptions) -> str:
    """The shell words that `srun` starts on each node."""
    command, container = request.words(options.warning), options.container
    if container == "apptainer":
        flags = (word for flag in apptainer_flags(fixed_flags(request, machine), request.target) for word in flag.words)
        return shlex.join(["apptainer", "run", *flags, image_file(request.image, ".sif"), *command])
    if container == "pyxis":
        return shlex.join([*pyxis_words(request), "tini", "-g", "--", "launch", *command])
    if container == "none":
        return shlex.join(["launch", *command])
    image = image_file(request.image, ".sqsh") if container == "enroot" else request.image
    return shlex.join(["bash", "-c", 'node "$@"', "node", image, *command])


def pyxis_words(request: RunRequest) -> list[str]:
    """pyxis' options of srun. Whether pyxis runs the entrypoint differs between sites, so the script spells it out.

    Source: args.c of https://github.com/NVIDIA/pyxis.
    """
    words = [f"--container-image={enroot_uri(request.image)}", "--no-container-mount-home", "--no-container-entrypoint"]
    if request.mounts:
        mounts = ",".join(volume.replace(",", "+") for volume in request.mounts)  # a comma separates mounts
        words.append(f"--container-mounts={mounts}")
    return words


def enroot_uri(image: str) -> str:
    """[REGISTRY#]IMAGE[:TAG]: with a slash after the registry, enroot would ask Docker Hub. Paths stay as they are.

    A name without a slash is a local image, so its exported file is used.
    """
    registry, slash, name = image.partition("/")
    if not slash:
        return f"./{image_file(image, '.sqsh')}"
    if not image.startswith((".", "/")) and ("." in registry or ":" in registry or registry == "localhost"):
        return f"{registry}#{name}"
    return image


def shm_expression() -> str:
    """Bytes of shared memory, computed by awk on the node as `shm_size` does it here.

    Debian's awk, mawk, limits `%d` to 2^31 - 1.
    """
    return (
        "awk '/^MemTotal/ { store = $2 * 1024 * "
        f"{OBJECT_STORE_SHARE}; if (store > {OBJECT_STORE_LIMIT}) store = {OBJECT_STORE_LIMIT}; "
        f'printf "%.0f", int(store / {SHM_SHARE}) + {NCCL_SHM} }}\' /proc/meminfo'
    )
