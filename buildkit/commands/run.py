"""The command `run`: starts the image on this machine, or prints how to start it elsewhere."""

import sys
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from buildkit.commands.job import (
    Command,
    DataFolder,
    Fabric,
    Gpus,
    JobName,
    Memory,
    OutputFolder,
    User,
    Variables,
    Volumes,
    make_machine,
    make_request,
    start_with,
    warm_folder,
)
from buildkit.commands.options import (
    AsJson,
    EngineName,
    ImageName,
    Project,
    RegistryCa,
    TargetName,
    VariantName,
    WarmCacheSource,
    WarmKey,
    WithDebug,
    emit,
    open_matrix,
    table_console,
)
from buildkit.errors import UsageError
from buildkit.host.accelerators import Flag
from buildkit.host.machine import Machine, read_machine
from buildkit.recipe.matrix import Matrix
from buildkit.running.engine import ENGINES, Docker, open_engine
from buildkit.running.flags import RunRequest, caller, container_flags, new_job_name, refuse_absent_gpus
from buildkit.running.formats import TEMPLATED, TEXTS, apptainer_flags, enroot_flags, podman_flags
from buildkit.running.nodes import dry_run as preview
from buildkit.running.nodes import run_nodes
from buildkit.running.slurm import slurm_text
from buildkit.warming.source import Source

AS_CALLER = ("apptainer", "enroot", "slurm")  # formats without a user of their own
FORMATS = (*TEXTS, *TEMPLATED, "slurm")


def run(
    target: TargetName,
    command: Command = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes: containers on a network of their own.")] = 1,
    variant: VariantName = None,
    with_debug: WithDebug = False,
    image: ImageName = None,
    volume: Volumes = None,
    data: DataFolder = None,
    output: OutputFolder = None,
    env: Variables = None,
    user: User = None,
    name: JobName = None,
    gpus: Gpus = None,
    memory: Memory = None,
    fabric: Fabric = None,
    warm: WarmCacheSource = None,
    warm_key: WarmKey = None,
    registry_ca: RegistryCa = None,
    engine: EngineName = "auto",
    interactive: Annotated[
        bool,
        typer.Option(
            "--interactive",
            "-i",
            "-it",
            help="Connect your terminal, or what is piped in, to the command.",
        ),
    ] = False,
    publish: Annotated[
        list[str] | None,
        typer.Option(
            "--publish", "-p", help="Port of the head to open here: [[HOST:]PORT:]PORT. Repeatable.", metavar="PORTS"
        ),
    ] = None,
    shown: Annotated[
        str | None, typer.Option("--print", help=f"Print how to run it instead: {', '.join(FORMATS)}.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show each container flag with its reason; run nothing.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands; run nothing.")] = False,
    as_json: AsJson = False,
    project: Project = None,
) -> None:
    """Run a job on one or several simulated nodes of this machine. Exits with the command's status.

    --print, --explain, --json and --dry-run only print; they run nothing.
    """
    if shown is not None and shown not in FORMATS:
        raise UsageError(f"--print {shown}: unknown format", f"one of: {', '.join(FORMATS)}")
    matrix = open_matrix(project)
    described = bool(shown or explain or dry_run or as_json)
    if not command and not described:
        raise UsageError("no command given", "add the command for `launch`: `-- train KEY=VALUE…` or `-- explain`")
    default = "slipway" if shown else new_job_name()
    chosen = matrix.variant(target, variant, with_debug)
    request = make_request(
        chosen, image, command, nodes, volume, data, output, env, user, name, gpus, default,
    )  # fmt: skip
    if shown in AS_CALLER and request.user != caller():
        raise UsageError(f"--user {request.user}: {shown} runs as the user who starts it", "leave out --user")
    if shown and publish:
        raise UsageError(
            f"--publish: the containers of --print {shown} open their ports by themselves",
            "leave it out: they use the host's network, or that of their cluster",
        )
    if interactive and shown and shown not in TEXTS:
        raise UsageError(f"--interactive: nobody types to a job of --print {shown}", f"one of: {', '.join(TEXTS)}")
    request = replace(request, published=tuple(publish or ()), interactive=interactive)
    machine = make_machine(request, gpus, memory, fabric)
    opened = None if described else open_engine(engine)
    if warm:
        request = start_with(
            request,
            warm_folder(Source(warm, warm_key or "", registry_ca), matrix, chosen, request.image, machine, opened),
        )
    if opened:
        refuse_absent_gpus(request, read_machine())
        raise typer.Exit(run_nodes(opened, request, machine))
    if dry_run and not shown:
        sys.stdout.write(preview(ENGINES.get(engine, Docker), request, machine))
        return
    flags = translated(shown, request.target, container_flags(request, machine), machine)
    if as_json:
        emit(description(shown or "docker", request, flags, written(matrix, shown or "docker", request, machine)))
    elif explain:
        show_reasons(flags)
    else:
        sys.stdout.write(written(matrix, shown or "docker", request, machine))


def translated(shown: str | None, target: str, flags: tuple[Flag, ...], machine: Machine) -> tuple[Flag, ...]:
    """The flags as the format writes them; docker's for formats without flags of their own."""
    if shown == "podman":
        return podman_flags(flags, machine)
    if shown == "apptainer":
        return apptainer_flags(flags, target)
    return enroot_flags(flags) if shown == "enroot" else flags


def written(matrix: Matrix, shown: str, request: RunRequest, machine: Machine) -> str:
    flags = container_flags(request, machine)
    if shown in TEXTS:
        return TEXTS[shown](request, machine, flags)
    if shown in TEMPLATED:
        return TEMPLATED[shown](request, machine, flags, matrix.images)
    return slurm_text(request, machine, matrix.images)


def description(shown: str, request: RunRequest, flags: tuple[Flag, ...], text: str) -> dict[str, Any]:
    return {
        "format": shown,
        "target": request.target,
        "image": request.image,
        "nodes": request.nodes,
        "flags": [{"flag": f"--{flag.name}", "value": flag.value, "reason": flag.reason} for flag in flags],
        "text": text,
    }


def show_reasons(flags: tuple[Flag, ...]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("flag", "value", "reason"):
        table.add_column(column, overflow="fold")
    for flag in flags:
        table.add_row(f"--{flag.name}", escape(flag.value), escape(flag.reason))
    table_console().print(table)
