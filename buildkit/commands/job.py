"""What `run` and `slurm` share: the options of a job, its request, and the machine that it runs on."""

from pathlib import Path
from typing import Annotated

import typer

from buildkit.commands.options import parse_size
from buildkit.errors import UsageError
from buildkit.host.machine import FABRICS, Machine, read_machine
from buildkit.recipe.matrix import Variant
from buildkit.running.flags import RunRequest, assume, caller

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
