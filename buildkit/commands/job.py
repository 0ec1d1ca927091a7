"""Shared by `run` and `slurm`: the options of a job, its request, and the machine that it runs on."""

import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from buildkit.commands.options import parse_size
from buildkit.errors import UsageError
from buildkit.host.machine import FABRICS, Machine, read_machine
from buildkit.images.build import cache_folder
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.running.engine import ContainerEngine
from buildkit.running.flags import RESULTS, RunRequest, assume, caller, checked_user
from buildkit.warming.cache import PLACE, key_here, refuse_other_lock, refuse_other_machine
from buildkit.warming.source import Source, open_cache

log = logging.getLogger(__name__)

Volumes = Annotated[
    list[str] | None, typer.Option("--volume", "-v", help="Mount HOST:CONTAINER[:ro] on every node. Repeatable.")
]
DataFolder = Annotated[Path | None, typer.Option("--data", help="Folder with input data, mounted read-only at /data.")]
OutputFolder = Annotated[Path | None, typer.Option("--output", help="Folder for results, mounted at /runs.")]
Variables = Annotated[list[str] | None, typer.Option("--env", "-e", help="Set NAME=VALUE on every node. Repeatable.")]
JobName = Annotated[str | None, typer.Option("--name", help="Job name. Containers are named NAME-node0, NAME-node1, …")]
User = Annotated[str | None, typer.Option("--user", "-u", help="UID[:GID] inside the container. Default: yours.")]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs per node, if the job runs on other machines.")]
Memory = Annotated[
    str | None, typer.Option("--memory", help="RAM per node, like 2t, if the job runs on other machines.")
]
Fabric = Annotated[
    str | None, typer.Option("--fabric", help=f"Fabric of the nodes, if the job runs elsewhere: {', '.join(FABRICS)}.")
]
Command = Annotated[
    list[str] | None,
    typer.Argument(
        help="After `--`: a command of `launch`, like train; `-- PROGRAM` to run a program on the cluster; or PROGRAM "
        "alone, which runs as it is, without a cluster.",
        metavar="COMMAND…",
    ),
]


def make_request(
    chosen: Variant, image: str | None, command: list[str] | None, nodes: int,
    volume: list[str] | None, data: Path | None, output: Path | None, env: list[str] | None, user: str | None,
    name: str | None, gpus: int | None, default_name: str,
) -> RunRequest:  # fmt: skip
    volumes = list(volume or ())
    volumes += [f"{data.resolve()}:/data:ro"] if data else []
    volumes += [f"{output.resolve()}:{RESULTS}"] if output else []
    request = RunRequest(
        image=image or f"slipway:{chosen.identifier}",
        target=chosen.target,
        command=tuple(command or ("train",)),
        nodes=nodes,
        volumes=tuple(volumes),
        environment=tuple(env or ()),
        user=checked_user(user) if user is not None else caller(),
        gpus=gpus,
        debug=chosen.debug,
        name=name or default_name,
    )
    if nodes > 1 and request.is_program:
        line = shlex.join(request.command)
        instead = f"to run it on the cluster, write `-- -- {line}`"
        log.warning("`%s` runs on each of the %d nodes, without a cluster; %s", line, nodes, instead)
    return request


def start_with(request: RunRequest, warm: Path) -> RunRequest:
    """The job, with an unpacked warm cache where `launch` looks for one."""
    return replace(request, volumes=(*request.volumes, f"{warm}:{PLACE}:ro"))


def warm_folder(
    source: Source, matrix: Matrix, chosen: Variant, image: str, machine: Machine, engine: ContainerEngine | None = None
) -> Path:
    """The folder of an unpacked warm cache for a job here on this engine, or without one for a job elsewhere.

    Raises `WarmCacheError` if it does not fit. Elsewhere, `launch` compares GPUs and driver; here, this function does.
    """
    found = engine.find(image) if engine else None
    lock = found.labels.get("dev.slipway.lock", "") if found else f"sha256:{read_lock(matrix, chosen).digest}"
    here = key_here(lock, chosen.target, machine)
    cache, folder = open_cache(source, cache_folder() / "warm", chosen.target, here)
    refuse_other_lock(cache, lock)
    if engine:
        refuse_other_machine(cache, here)
    return folder


def make_machine(request: RunRequest, gpus: int | None, memory: str | None, fabric: str | None) -> Machine:
    if fabric is not None and fabric not in FABRICS:
        raise UsageError(f"--fabric {fabric}: unknown fabric", f"one of: {', '.join(FABRICS)}")
    size = parse_size(memory, "--memory") if memory else None
    return assume(read_machine(), request.target, gpus, size, fabric)
