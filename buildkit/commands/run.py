"""The command `run`: starts the image on this machine, or prints how to start it elsewhere."""

import sys
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from buildkit.commands.arguments import command
from buildkit.commands.job import JobArguments, make_cache, of_the_user, start_with, warm_folder
from buildkit.commands.options import (
    AsJson,
    EngineName,
    Project,
    WarmCacheArguments,
    WithDebug,
    emit,
    open_matrix,
    parse_size,
    table_console,
)
from buildkit.errors import UsageError
from buildkit.host.accelerators import Flag
from buildkit.host.machine import FABRICS, Machine, read_machine
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.running.engine import ENGINES, Docker, open_engine
from buildkit.running.flags import (
    RunRequest,
    assume,
    caller,
    checked_user,
    container_flags,
    new_job_name,
    refuse_absent_gpus,
)
from buildkit.running.formats import TEMPLATED, TEXTS, apptainer_flags, enroot_flags, podman_flags
from buildkit.running.nodes import dry_run as preview
from buildkit.running.nodes import run_nodes
from buildkit.running.slurm import slurm_text

AS_CALLER = ("apptainer", "enroot", "slurm")  # formats without a user of their own
FORMATS = (*TEXTS, *TEMPLATED, "slurm")


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    job: JobArguments
    with_debug: WithDebug = False
    user: Annotated[
        str | None, typer.Option("--user", "-u", help="UID[:GID] inside the container. Default: yours.")
    ] = None
    memory: Annotated[
        str | None, typer.Option("--memory", help="RAM per node, like 2t, if the job runs on other machines.")
    ] = None
    fabric: Annotated[
        str | None,
        typer.Option("--fabric", help=f"Fabric of the nodes, if the job runs elsewhere: {', '.join(FABRICS)}."),
    ] = None
    cache: WarmCacheArguments
    engine: EngineName = "auto"
    interactive: Annotated[
        bool,
        typer.Option("--interactive", "-i", "-it", help="Connect your terminal, or what is piped in, to the command."),
    ] = False
    publish: Annotated[
        list[str],
        typer.Option(
            "--publish", "-p", help="Port of the head to open here: [[HOST:]PORT:]PORT. Repeatable.", metavar="PORTS"
        ),
    ] = field(default_factory=list)
    shown: Annotated[
        str | None, typer.Option("--print", help=f"Print how to run it instead: {', '.join(FORMATS)}.")
    ] = None
    explain: Annotated[
        bool, typer.Option("--explain", help="Show each container flag with its reason; run nothing.")
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands; run nothing.")] = False
    as_json: AsJson = False
    project: Project = None

    @property
    def only_prints(self) -> bool:
        return bool(self.shown or self.explain or self.dry_run or self.as_json)

    def request(self, chosen: Variant) -> RunRequest:
        """Raises `UsageError` for arguments that contradict each other."""
        request = self.job.request(chosen, "slipway" if self.shown else new_job_name())
        if self.user is not None:
            request = replace(request, user=checked_user(self.user))
        if self.shown in AS_CALLER and request.user != caller():
            raise UsageError(f"--user {request.user}: {self.shown} runs as the user who starts it", "leave out --user")
        if self.shown and self.publish:
            raise UsageError(
                f"--publish: the containers of --print {self.shown} open their ports by themselves",
                "leave it out: they use the host's network, or that of their cluster",
            )
        if self.interactive and self.shown and self.shown not in TEXTS:
            raise UsageError(
                f"--interactive: nobody types to a job of --print {self.shown}", f"one of: {', '.join(TEXTS)}"
            )
        request = replace(request, published=tuple(self.publish), interactive=self.interactive)
        return of_the_user(request, self.job.cache, self.shown)

    def machine(self) -> Machine:
        """This machine, changed to match the nodes on which the job will run."""
        if self.fabric is not None and self.fabric not in FABRICS:
            raise UsageError(f"--fabric {self.fabric}: unknown fabric", f"one of: {', '.join(FABRICS)}")
        memory = parse_size(self.memory, "--memory") if self.memory else None
        return assume(read_machine(), self.job.target, self.job.gpus, memory, self.fabric)


@command
def run(arguments: RunArguments) -> None:
    """Run a job on one or several simulated nodes of this machine. Exits with the command's status.

    --print, --explain, --json and --dry-run only print; they run nothing.
    """
    shown, job = arguments.shown, arguments.job
    if shown is not None and shown not in FORMATS:
        raise UsageError(f"--print {shown}: unknown format", f"one of: {', '.join(FORMATS)}")
    matrix = open_matrix(arguments.project)
    if not job.command and not arguments.only_prints:
        raise UsageError("no command given", "add the command for `launch`: `-- train KEY=VALUE…` or `-- explain`")
    chosen = matrix.variant(job.target, job.variant, arguments.with_debug)
    request, machine = arguments.request(chosen), arguments.machine()
    engine = None if arguments.only_prints else open_engine(arguments.engine)
    if source := arguments.cache.source:
        request = start_with(request, warm_folder(source, matrix, chosen, request.image, machine, engine))
    if engine:
        refuse_absent_gpus(request, read_machine())
        request = make_cache(request, job.cache is not None)
        raise typer.Exit(run_nodes(engine, request, machine))
    if arguments.dry_run and not shown:
        sys.stdout.write(preview(ENGINES.get(arguments.engine, Docker), request, machine))
        return
    flags = translated(shown, request.target, container_flags(request, machine), machine)
    if arguments.as_json:
        emit(description(shown or "docker", request, flags, written(matrix, shown or "docker", request, machine)))
    elif arguments.explain:
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
