"""Shared by `run` and `slurm`: the arguments of a job, its request, and the warm cache that it starts with."""

import errno
import logging
import os
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from buildkit.commands.options import ImageName, TargetName, VariantName
from buildkit.errors import RunError, UsageError
from buildkit.host.machine import Machine
from buildkit.images.build import cache_folder
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.running.accounts import HUB_VARIABLE, account_flags
from buildkit.running.engine import ContainerEngine
from buildkit.running.flags import RESULTS, RunRequest, caller
from buildkit.warming.cache import PLACE, key_here, refuse_other_lock, refuse_other_machine
from buildkit.warming.source import Source, open_cache

log = logging.getLogger(__name__)

Volumes = Annotated[
    list[str], typer.Option("--volume", "-v", help="Mount HOST:CONTAINER[:ro] on every node. Repeatable.")
]
Variables = Annotated[list[str], typer.Option("--env", "-e", help="Set NAME=VALUE on every node. Repeatable.")]


@dataclass(frozen=True, kw_only=True)
class JobArguments:
    """The job of `run` and `slurm`."""

    target: TargetName
    command: Annotated[
        list[str],
        typer.Argument(
            help="After `--`: a command of `launch`, like train; `-- PROGRAM` to run a program on the cluster; or "
            "PROGRAM alone, which runs as it is, without a cluster.",
            metavar="COMMAND…",
        ),
    ] = field(default_factory=list)
    nodes: Annotated[
        int,
        typer.Option(min=1, help="Number of nodes. `run` simulates several by containers on a network of their own."),
    ] = 1
    variant: VariantName = None
    image: ImageName = None
    volume: Volumes = field(default_factory=list)
    data: Annotated[Path | None, typer.Option("--data", help="Folder with input data, mounted read-only at /data.")] = (
        None
    )
    output: Annotated[Path | None, typer.Option("--output", help="Folder for results, mounted at /runs.")] = None
    cache: Annotated[
        str | None,
        typer.Option(
            "--cache",
            help="Folder for models and data from the Hugging Face Hub, which containers share; `none`: no folder. "
            "Default: $HF_HOME, or else ~/.cache/slipway/huggingface. For Kubernetes: a folder or claim, none by "
            "default.",
            metavar="DIR",
        ),
    ] = None
    env: Variables = field(default_factory=list)
    name: Annotated[
        str | None, typer.Option("--name", help="Job name. `run` names its containers NAME-node0, NAME-node1, …")
    ] = None
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs per node, if the job runs on other machines.")
    ] = None

    def request(self, chosen: Variant, default_name: str) -> RunRequest:
        volumes = list(self.volume)
        volumes += [f"{self.data.resolve()}:/data:ro"] if self.data else []
        volumes += [f"{self.output.resolve()}:{RESULTS}"] if self.output else []
        request = RunRequest(
            image=self.image or f"slipway:{chosen.identifier}",
            target=chosen.target,
            command=tuple(self.command or ("train",)),
            nodes=self.nodes,
            volumes=tuple(volumes),
            environment=tuple(self.env),
            user=caller(),
            gpus=self.gpus,
            debug=chosen.debug,
            name=self.name or default_name,
        )
        if self.nodes > 1 and request.is_program:
            line = shlex.join(request.command)
            instead = f"to run it on the cluster, write `-- -- {line}`"
            log.warning("`%s` runs on each of the %d nodes, without a cluster; %s", line, self.nodes, instead)
        return request


def of_the_user(request: RunRequest, cache: str | None, shown: str | None = None) -> RunRequest:
    """The job with the user's accounts and cache, as `--cache` and the variables here say; `shown` is the format.

    Raises `UsageError` for a cache that contradicts `--env`.
    """
    request = replace(request, accounts=account_flags(os.environ, request.environment))
    by_hand = any(variable.partition("=")[0] == HUB_VARIABLE for variable in request.environment)
    if by_hand and cache not in (None, "none"):
        raise UsageError(f"--cache {cache}: --env {HUB_VARIABLE} names another place", "leave out one of them")
    if by_hand or cache == "none":
        return request
    if shown == "kubernetes":
        return replace(request, cache=cache or "")
    if cache is None and request.user != caller():
        return request  # another user could not write into the caller's folder
    return replace(request, cache=cache_on_host(cache))


def cache_on_host(cache: str | None) -> str:
    """The folder that `--cache` names, or the default one. Raises `UsageError` for a folder that engines cannot mount.

    Without a home there is no default: then it is empty.
    """
    try:
        given = os.environ.get(HUB_VARIABLE) or cache_folder() / "huggingface" if cache is None else cache
        path = str(given) and str(Path(given).expanduser().resolve())
    except RuntimeError:  # no home
        path = ""
    if (cache is not None and not path) or re.search(r"[:\n]", path):
        raise UsageError(f"--cache {cache or path}: not a folder that can be mounted", "name another, or `none`")
    return path


def make_cache(request: RunRequest, chosen: bool) -> RunRequest:
    """Makes the cache's folder. Without a place for it a job runs without; raises `RunError` for a `chosen` one."""
    if not request.cache:
        return request
    try:
        Path(request.cache).mkdir(parents=True, exist_ok=True)
        if not os.access(request.cache, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not writable")
    except OSError as error:
        if chosen:
            raise RunError(f"--cache {request.cache}: {error.strerror}", "name another folder, or none") from error
        log.warning("no cache: %s: %s; `--cache DIR` names another folder", request.cache, error.strerror)
        return replace(request, cache="")
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
    built = engine.find(image) if engine else None
    lock = built.labels.get("dev.slipway.lock", "") if built else f"sha256:{read_lock(matrix, chosen).digest}"
    here = key_here(lock, chosen.target, machine)
    cache, folder = open_cache(source, cache_folder() / "warm", chosen.target, here)
    refuse_other_lock(cache, lock)
    if engine:
        refuse_other_machine(cache, here)
    return folder
