"""Prints a run for other tools: docker, podman, apptainer and enroot commands, Compose and Kubernetes files.

Each format is a function of the request, the machine and docker's flags (flags.py). Longer texts are templates in
`images/run/`. slurm.py writes batch scripts.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from buildkit.errors import UsageError
from buildkit.host.accelerators import ACCELERATORS, Flag
from buildkit.host.machine import Machine
from buildkit.running.flags import GPUS_ASSUMED, STOP_SECONDS, RunRequest, container_flags

HOSTS = (
    Flag("env", "SLIPWAY_HOSTS", "the nodes, head first, from your environment"),
    Flag("env", "SLIPWAY_TOKEN", "the job's shared secret, from your environment"),
)
MAKE_TOKEN = "openssl rand -hex 32"
PASTED_TOKEN = "SLIPWAY_TOKEN=THE_SECRET"  # `launch` refuses a secret as short as this
TERMINAL = (
    Flag("interactive", "", "your input reaches the command"),
    Flag("tty", "", "your terminal"),
)
JOB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")  # a Service's (DNS-1035), a pod's, a Compose project's
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # DNS-1123
RDMA_RESOURCE = "rdma/rdma_shared_device_a"  # the name in NVIDIA's network operator's own example


def templates(images: Path) -> Environment:
    loader = FileSystemLoader(images / "run")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.keep_trailing_newline = True
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    # Compose and the kubelet read `$` as the start of a variable, and `$$` as `$`.
    environment.filters["literal"] = lambda value: json.dumps(value, ensure_ascii=False).replace("$", "$$")
    environment.filters["shell"] = shlex.quote
    environment.filters["words"] = lambda words: shlex.join(words)
    return environment


def command_line(program: Iterable[str], flags: Iterable[Flag], arguments: Iterable[str]) -> str:
    """One shell command with a flag per line."""
    lines = [shlex.join(program), *(flag.text for flag in flags), shlex.join(arguments)]
    return " \\\n  ".join(line for line in lines if line) + "\n"


def preparation(request: RunRequest) -> str:
    """What people do before the command line. Docker would create a missing cache as root."""
    made = f"mkdir -p {shlex.quote(request.cache)}\n" if request.cache else ""
    if request.nodes == 1:
        return made
    return (
        "# Make the job's secret once, on one machine only:\n"
        f"#   {MAKE_TOKEN}\n"
        f"# Run this on each of the {request.nodes} machines, after setting the same values on all of them:\n"
        f"#   export SLIPWAY_HOSTS=first-host,second-host {PASTED_TOKEN}\n" + made
    )


def joined(request: RunRequest, flags: tuple[Flag, ...]) -> tuple[Flag, ...]:
    """The flags of a command line that a person runs on each machine."""
    terminal = TERMINAL if request.interactive else ()
    return (*flags, *terminal, *(HOSTS if request.nodes > 1 else ()))


def docker_text(request: RunRequest, _machine: Machine, flags: tuple[Flag, ...]) -> str:
    line = command_line(("docker", "run", "--rm"), joined(request, flags), (request.image, *request.words()))
    return preparation(request) + line


def podman_flags(flags: Sequence[Flag], machine: Machine) -> tuple[Flag, ...]:
    """Docker's flags as podman writes them. Without root, podman can pass on only the caller's groups and limits."""
    translated: list[Flag] = []
    asked = [flag.value for flag in flags if flag.name == "user" and flag.value != f"{machine.uid}:{machine.gid}"]
    for flag in flags:
        if flag.name == "gpus":
            devices = re.findall(r"\d+", flag.value) or ["all"]
            translated += [Flag("device", f"nvidia.com/gpu={device}", "by CDI, " + flag.reason) for device in devices]
        elif machine.rootless and flag.name in ROOTLESS and flag.value not in asked:
            translated += [other for other in (ROOTLESS[flag.name],) if other not in translated]
        else:
            translated.append(flag)
    if machine.selinux and any(flag.name in ("device", "volume") for flag in translated):
        translated.append(Flag("security-opt", "label=disable", "SELinux otherwise blocks devices and volumes"))
    return tuple(translated)


ROOTLESS = {
    "group-add": Flag("group-add", "keep-groups", "your groups own the GPU devices; join render and video"),
    "ulimit": Flag("ulimit", "host", "your limits, which podman cannot raise without root"),
    "user": Flag("userns", "keep-id", "files that the job writes belong to you"),
}


def podman_text(request: RunRequest, machine: Machine, flags: tuple[Flag, ...]) -> str:
    flags = podman_flags(joined(request, flags), machine)
    line = command_line(("podman", "run", "--rm"), flags, (request.image, *request.words()))
    return preparation(request) + line


def chosen_gpus(flags: Iterable[Flag]) -> list[Flag]:
    """The variable that chooses the GPUs where the runtime hands in all of them; none if it is to be all."""
    listed = [re.findall(r"\d+", flag.value) for flag in flags if flag.name == "gpus"]
    render_nodes = [flag for flag in flags if flag.value.startswith("/dev/dri/render")]
    reason = "only these GPUs are asked for, and the runtime hands in all of them"
    if listed and listed[0]:
        return [Flag("env", f"CUDA_VISIBLE_DEVICES={','.join(listed[0])}", reason)]
    if render_nodes:
        return [Flag("env", f"ROCR_VISIBLE_DEVICES={','.join(map(str, range(len(render_nodes))))}", reason)]
    return []


def apptainer_flags(flags: Sequence[Flag], target: str) -> tuple[Flag, ...]:
    """GPUs, mounts and variables. Apptainer uses the host's devices, /dev/shm, network, user, variables and limits."""
    gpus = ACCELERATORS[target].apptainer
    translated = [*([gpus] if gpus else []), *chosen_gpus(flags)]
    for flag in flags:
        if flag.name == "volume":
            translated.append(Flag("bind", flag.value, flag.reason))
        elif flag.name == "env" and "=" in flag.value:
            translated.append(flag)
    return tuple(translated)


def image_file(image: str, suffix: str) -> str:
    """The file that `buildkit export` makes of the image by default; the name of such a file stays as it is."""
    return image if image.endswith(suffix) else re.sub(r"[/:@]", "_", image) + suffix


def apptainer_text(request: RunRequest, _machine: Machine, flags: tuple[Flag, ...]) -> str:
    name = image_file(request.image, ".sif")
    return (
        f"# {name} is made by `apptainer build {name} docker-daemon:{request.image}`.\n"
        "# Devices, /dev/shm, network and limits are the host's: run `ulimit -l unlimited` first.\n"
        + preparation(request)
        + command_line(("apptainer", "run"), apptainer_flags(flags, request.target), (name, *request.words()))
    )


def enroot_flags(flags: Sequence[Flag]) -> tuple[Flag, ...]:
    """Mounts and variables. enroot's hooks add GPUs and RDMA, and read variables to do so."""
    translated = chosen_gpus(flags)
    for flag in flags:
        if flag.name == "volume":
            translated.append(Flag("mount", flag.value, flag.reason))
        elif flag.name == "env":
            translated.append(flag)
        elif flag.name == "device" and flag.value == "/dev/infiniband":
            translated.append(Flag("env", "MELLANOX_VISIBLE_DEVICES=all", flag.reason))
    return tuple(translated)


def enroot_text(request: RunRequest, _machine: Machine, flags: tuple[Flag, ...]) -> str:
    name = image_file(request.image, ".sqsh")
    return (
        f"# {name} is made by `enroot import --output {name} dockerd://{request.image}`.\n"
        + preparation(request)
        + command_line(("enroot", "start"), enroot_flags(joined(request, flags)), (name, *request.words()))
    )


def grouped(flags: Iterable[Flag]) -> dict[str, list[Flag]]:
    groups: dict[str, list[Flag]] = {}
    for flag in flags:
        groups.setdefault(flag.name, []).append(flag)
    return groups


def check_name(request: RunRequest, shown: str) -> None:
    if not JOB_NAME.fullmatch(request.name):
        raise UsageError(
            f"--name {request.name}: not a name for --print {shown}",
            "start with a lower-case letter, then use lower-case letters, digits and dashes: 52 characters at most",
        )


def compose_text(request: RunRequest, machine: Machine, _flags: tuple[Flag, ...], images: Path) -> str:
    check_name(request, "compose")
    network = "host" if request.nodes == 1 else None
    nodes = [grouped(container_flags(request, machine, network, rank)) for rank in range(request.nodes)]
    hosts = ",".join(f"node{rank}" for rank in range(request.nodes))
    late = any(flag.shell for flags in nodes for group in flags.values() for flag in group)
    values = {"request": request, "nodes": nodes, "hosts": hosts, "stop_seconds": STOP_SECONDS, "late_group": late}
    values |= {"make_token": MAKE_TOKEN, "pasted_token": PASTED_TOKEN}
    return templates(images).get_template("compose.yaml.j2").render(values)


def kubernetes_text(
    request: RunRequest, machine: Machine, flags: tuple[Flag, ...], images: Path, rdma_resource: str = RDMA_RESOURCE
) -> str:
    """An Indexed Job with the resources of its pods, and the headless service that gives them names."""
    check_name(request, "kubernetes")
    if wrong := next((name for name in request.environment if "=" not in name), None):
        raise UsageError(f"--env {wrong}: a pod does not have your variables", f"write --env {wrong}=VALUE")
    accelerator = ACCELERATORS[request.target]
    limits: dict[str, int] = {}
    if accelerator.has_gpus:
        limits[accelerator.resource] = request.gpus or machine.gpus[request.target].count or GPUS_ASSUMED
    if accelerator.has_gpus and machine.fabric != "ethernet":
        efa = machine.fabric == "efa"
        limits["vpc.amazonaws.com/efa" if efa else rdma_resource] = max(len(machine.hcas), 1) if efa else 1
    values: dict[str, Any] = {
        "request": request,
        "flags": grouped(flag for flag in flags if not flag.shell),
        "limits": limits,
        "volumes": [kubernetes_volume(index, volume) for index, volume in enumerate(request.mounts)],
        "environment": dict(variable.partition("=")[::2] for variable in request.variables),
        "hosts": ",".join(f"{request.name}-{rank}.{request.name}" for rank in range(request.nodes)),
        "host_network": accelerator.has_gpus and machine.fabric in ("infiniband", "roce"),
        "stop_seconds": STOP_SECONDS,
    }
    return templates(images).get_template("kubernetes.yaml.j2").render(values)


def kubernetes_volume(index: int, volume: str) -> dict[str, Any]:
    """The pod's volume: a path is a folder of the node, a bare name is a PersistentVolumeClaim.

    Raises `UsageError` for anything else.
    """
    source, _, rest = volume.partition(":")
    mount, _, options = rest.partition(":")
    if not (source.startswith("/") or CLAIM.fullmatch(source)) or not mount.startswith("/"):
        raise UsageError(
            f"--volume {volume}: neither a folder of the nodes nor a claim", "write /FOLDER:/PLACE or CLAIM:/PLACE"
        )
    return {
        "name": f"volume-{index}",
        "path": source if source.startswith("/") else "",
        "claim": "" if source.startswith("/") else source,
        "mount": mount,
        "read_only": "ro" in options.split(","),
    }


TEXTS: dict[str, Callable[[RunRequest, Machine, tuple[Flag, ...]], str]] = {
    "docker": docker_text,
    "podman": podman_text,
    "apptainer": apptainer_text,
    "enroot": enroot_text,
}
TEMPLATED: dict[str, Callable[[RunRequest, Machine, tuple[Flag, ...], Path], str]] = {
    "compose": compose_text,
    "kubernetes": kubernetes_text,
}
