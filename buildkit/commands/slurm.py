"""The command `slurm`."""

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from buildkit.commands.job import (
    Command,
    DataFolder,
    Gpus,
    OutputFolder,
    Variables,
    Volumes,
    make_machine,
    make_request,
    start_with,
    warm_folder,
)
from buildkit.commands.options import (
    AsJson,
    ImageName,
    Project,
    RegistryCa,
    TargetName,
    VariantName,
    WarmCacheSource,
    WarmKey,
    emit,
    open_matrix,
)
from buildkit.errors import UsageError
from buildkit.running.slurm import CONTAINERS, SlurmOptions, slurm_text
from buildkit.warming.source import Source


def slurm(
    target: TargetName,
    command: Command = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes, with one task on each.")] = 1,
    variant: VariantName = None,
    image: ImageName = None,
    container: Annotated[
        str, typer.Option(help=f"Container runtime on the nodes: {', '.join(CONTAINERS)}.")
    ] = "docker",
    volume: Volumes = None,
    data: DataFolder = None,
    output: OutputFolder = None,
    env: Variables = None,
    name: Annotated[str | None, typer.Option(help="Job name.")] = None,
    gpus: Gpus = None,
    warm: WarmCacheSource = None,
    warm_key: WarmKey = None,
    registry_ca: RegistryCa = None,
    time: Annotated[str | None, typer.Option(help="Time limit, like 12:00:00 or 3-00:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Features that nodes must have.")] = None,
    nodelist: Annotated[str | None, typer.Option(help="Nodes to use, like gpu-[0,1].")] = None,
    exclude: Annotated[str | None, typer.Option(help="Nodes to avoid.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="CPUs per node.")] = None,
    mem: Annotated[str, typer.Option(help="Memory per node; 0 means all of it.")] = "0",
    exclusive: Annotated[bool, typer.Option(help="Share the nodes with no other job.")] = True,
    log: Annotated[str, typer.Option(help="File for the job's output.")] = "slurm-%j.out",
    warning: Annotated[
        int, typer.Option(min=1, help="Seconds before the time limit at which the job is asked to write a checkpoint.")
    ] = 120,
    requeue: Annotated[bool, typer.Option(help="Requeue the job when its time is up.")] = True,
    as_json: AsJson = False,
    project: Project = None,
) -> None:
    """Print a Slurm batch script for the job."""
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant)
    request = make_request(
        chosen, image, command, nodes, volume, data, output, env, None, name, gpus, "slipway"
    )  # fmt: skip
    machine = make_machine(request, gpus, None, None)
    if warm and container == "none":
        raise UsageError("--warm needs a container", "fill SLIPWAY_CACHE_DIR by hand, or choose another --container")
    if warm:
        request = start_with(
            request, warm_folder(Source(warm, warm_key or "", registry_ca), matrix, chosen, request.image, machine)
        )
    options = SlurmOptions(
        container=container, time=time, partition=partition, account=account, qos=qos, constraint=constraint,
        nodelist=nodelist, exclude=exclude, cpus_per_task=cpus_per_task, mem=mem, exclusive=exclusive, output=log,
        warning=warning, requeue=requeue,
    )  # fmt: skip
    text = slurm_text(request, machine, matrix.images, options)
    if as_json:
        emit({"target": target, "options": asdict(options), "text": text})
    else:
        sys.stdout.write(text)
