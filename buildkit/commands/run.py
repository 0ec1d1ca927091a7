"""The commands that run the image or write down how: `run` and `slurm`."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from buildkit.commands.options import (
    AsJson,
    EngineName,
    ImageName,
    Project,
    TargetName,
    VariantName,
    WithDebug,
    emit,
    open_matrix,
    parse_size,
)
from buildkit.errors import UsageError
from buildkit.host.machine import FABRICS, Machine, read_machine
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.running.engine import ENGINES, Docker, open_engine
from buildkit.running.flags import Flag, RunRequest, assume, caller, container_flags, new_job_name
from buildkit.running.formats import TEMPLATED, TEXTS, apptainer_flags, enroot_flags, podman_flags
from buildkit.running.nodes import dry_run as preview
from buildkit.running.nodes import run_nodes
from buildkit.running.slurm import CONTAINERS, SlurmOptions, slurm_text

FORMATS = (*TEXTS, *TEMPLATED, "slurm")

Volumes = Annotated[list[str] | None, typer.Option("--volume", "-v", help="HOST:CONTAINER[:ro], on every node.")]
DataFolder = Annotated[Path | None, typer.Option("--data", help="A folder that the job reads, as /data.")]
OutputFolder = Annotated[Path | None, typer.Option("--output", help="A folder that the job writes to, as /runs.")]
Variables = Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE, on every node.")]
JobName = Annotated[str | None, typer.Option("--name", help="Name of the job; containers are NAME-node0 and so on.")]
User = Annotated[str | None, typer.Option("--user", "-u", help="uid:gid; the caller's own when not given.")]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs of each node, where it is not this machine.")]
Memory = Annotated[
    str | None, typer.Option("--memory", help="RAM of each node, like 2t, where it is not this machine.")
]
Fabric = Annotated[str | None, typer.Option("--fabric", help=f"{', '.join(FABRICS)}: of the nodes, if not as here.")]
Command = Annotated[list[str] | None, typer.Argument(help="What `launch` gets, after `--`.", metavar="COMMAND…")]


def register(app: typer.Typer) -> None:
    app.command(context_settings={"allow_interspersed_args": False})(run)
    app.command(context_settings={"allow_interspersed_args": False})(slurm)


def run(
    target: TargetName,
    command: Command = None,
    nodes: Annotated[
        int, typer.Option(min=1, help="Containers to start, each one node, on a network of their own.")
    ] = 1,
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
    engine: EngineName = "auto",
    shown: Annotated[
        str | None, typer.Option("--print", help=f"Run nothing; print how to, for {', '.join(FORMATS)}.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Run nothing; show each flag with its reason.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Run nothing; print what would be run.")] = False,
    as_json: AsJson = False,
    project: Project = None,
) -> None:
    """Run the image's launcher on one or several nodes of this machine; exits with the command's status.

    With --print, --explain, --json or --dry-run nothing is run.
    """
    if shown is not None and shown not in FORMATS:
        raise UsageError(f"--print {shown}: there is no such format", f"one of: {', '.join(FORMATS)}")
    matrix = open_matrix(project)
    described = bool(shown or explain or dry_run or as_json)
    if not command and not described:
        raise UsageError("there is no command", "add what `launch` shall run: `-- train KEY=VALUE…` or `-- explain`")
    default = "slipway" if shown else new_job_name()
    request = make_request(
        matrix.variant(target, variant, with_debug), image, command, nodes, volume, data, output, env, user,
        name, gpus, default,
    )  # fmt: skip
    machine = make_machine(request, gpus, memory, fabric)
    if not described:
        raise typer.Exit(run_nodes(open_engine(engine), request, machine))
    if dry_run and not shown:
        sys.stdout.write(preview(ENGINES.get(engine, Docker), request, machine))
        return
    flags = translated(shown, container_flags(request, machine), machine)
    if as_json:
        emit(description(shown or "docker", request, flags, written(matrix, shown or "docker", request, machine)))
    elif explain:
        show_reasons(flags)
    else:
        sys.stdout.write(written(matrix, shown or "docker", request, machine))


def slurm(
    target: TargetName,
    command: Command = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job, one task on each.")] = 1,
    variant: VariantName = None,
    image: ImageName = None,
    container: Annotated[str, typer.Option(help=f"What starts the image: {', '.join(CONTAINERS)}.")] = "docker",
    volume: Volumes = None,
    data: DataFolder = None,
    output: OutputFolder = None,
    env: Variables = None,
    name: Annotated[str | None, typer.Option(help="Name of the job.")] = None,
    gpus: Gpus = None,
    time: Annotated[str | None, typer.Option(help="Time limit, like 12:00:00 or 3-00:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Features that the nodes must have.")] = None,
    nodelist: Annotated[str | None, typer.Option(help="These nodes, like gpu-[0,1].")] = None,
    exclude: Annotated[str | None, typer.Option(help="Not these nodes.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="CPUs of each node.")] = None,
    mem: Annotated[str, typer.Option(help="Memory of each node; 0 is all of it.")] = "0",
    exclusive: Annotated[bool, typer.Option(help="No other job on the nodes.")] = True,
    log: Annotated[str, typer.Option(help="File for the job's output.")] = "slurm-%j.out",
    warning: Annotated[
        int, typer.Option(min=1, help="Seconds before the limit in which a checkpoint is written.")
    ] = 120,
    requeue: Annotated[bool, typer.Option(help="Back into the queue when the time was up.")] = True,
    as_json: AsJson = False,
    project: Project = None,
) -> None:
    """Write the batch script of a job for Slurm on stdout."""
    matrix = open_matrix(project)
    request = make_request(
        matrix.variant(target, variant), image, command, nodes, volume, data, output, env, None, name, gpus, "slipway"
    )
    options = SlurmOptions(
        container=container, time=time, partition=partition, account=account, qos=qos, constraint=constraint,
        nodelist=nodelist, exclude=exclude, cpus_per_task=cpus_per_task, mem=mem, exclusive=exclusive, output=log,
        warning=warning, requeue=requeue,
    )  # fmt: skip
    text = slurm_text(request, make_machine(request, gpus, None, None), matrix.images, options)
    if as_json:
        emit({"target": target, "options": asdict(options), "text": text})
    else:
        sys.stdout.write(text)


def make_request(
    chosen: Variant, image: str | None, command: list[str] | None, nodes: int,
    volume: list[str] | None, data: Path | None, output: Path | None, env: list[str] | None, user: str | None,
    name: str | None, gpus: int | None, default_name: str,
) -> RunRequest:  # fmt: skip
    volumes = list(volume or ())
    volumes += [f"{data.resolve()}:/data:ro"] if data else []
    volumes += [f"{output.resolve()}:/runs"] if output else []
    return RunRequest(
        image=image or f"slipway:{chosen.identifier}",
        target=chosen.target,
        command=tuple(command or ("train",)),
        nodes=nodes,
        volumes=tuple(volumes),
        environment=tuple(env or ()),
        user=user or caller(),
        gpus=gpus,
        debug=chosen.debug,
        name=name or default_name,
    )


def make_machine(request: RunRequest, gpus: int | None, memory: str | None, fabric: str | None) -> Machine:
    if fabric is not None and fabric not in FABRICS:
        raise UsageError(f"--fabric {fabric}: there is no such fabric", f"one of: {', '.join(FABRICS)}")
    size = parse_size(memory, "--memory") if memory else None
    return assume(read_machine(), request.target, gpus, size, fabric)


def translated(shown: str | None, flags: tuple[Flag, ...], machine: Machine) -> tuple[Flag, ...]:
    """The flags in the words of the format where it has flags of its own, else in docker's."""
    if shown == "podman":
        return podman_flags(flags, machine)
    if shown == "apptainer":
        return apptainer_flags(flags)
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
    Console(width=None if sys.stdout.isatty() else 160).print(table)
