"""The command `slurm`."""

import sys
from dataclasses import asdict, dataclass

from buildkit.commands.arguments import command
from buildkit.commands.job import JobArguments, of_the_user, start_with, warm_folder
from buildkit.commands.options import AsJson, Project, WarmCacheArguments, emit, open_matrix
from buildkit.errors import UsageError
from buildkit.host.machine import read_machine
from buildkit.running.flags import assume
from buildkit.running.slurm import SlurmOptions, slurm_text


@dataclass(frozen=True, kw_only=True)
class SlurmArguments:
    job: JobArguments
    cache: WarmCacheArguments
    sbatch: SlurmOptions
    as_json: AsJson = False
    project: Project = None


@command
def slurm(arguments: SlurmArguments) -> None:
    """Print a Slurm batch script for the job."""
    job, sbatch = arguments.job, arguments.sbatch
    matrix = open_matrix(arguments.project)
    chosen = matrix.variant(job.target, job.variant)
    request = job.request(chosen, "slipway")
    if sbatch.container != "none":
        request = of_the_user(request, job.cache, "slurm")
    elif job.cache not in (None, "none"):
        raise UsageError("--cache needs a container", "set HF_HOME on the nodes, or choose another --container")
    machine = assume(read_machine(), job.target, job.gpus)
    if source := arguments.cache.source:
        if sbatch.container == "none":
            hint = "fill SLIPWAY_CACHE_DIR by hand, or choose another --container"
            raise UsageError("--warm needs a container", hint)
        request = start_with(request, warm_folder(source, matrix, chosen, request.image, machine))
    text = slurm_text(request, machine, matrix.images, sbatch)
    if arguments.as_json:
        emit({"target": job.target, "options": asdict(sbatch), "text": text})
    else:
        sys.stdout.write(text)
