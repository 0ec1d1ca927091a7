"""Slurm, from `srun`'s variables alone: containers rarely have `scontrol`.

Variables: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES. The step's variables outrank the
job's, as a step may use fewer nodes. The rank is SLURM_NODEID; SLURM_PROCID counts tasks, several of which may share a
node.
"""

from collections.abc import Mapping

from entrypoints.environments.base import Allocation, Environment, Reader
from entrypoints.errors import DetectionError
from entrypoints.hostlist import HostlistError, expand

JOB_ID = "SLURM_JOB_ID"
STEP_ID = "SLURM_STEP_ID"
NODE_COUNT = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
NODE_LIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
NODE_RANK = "SLURM_NODEID"
LOCAL_RANK = "SLURM_LOCALID"

_START_WITH_SRUN = "start one task per node with srun --ntasks-per-node=1, and hand SLURM_* into the container"


class Slurm(Environment):
    name = "slurm"

    @classmethod
    def detect(cls, variables: Mapping[str, str], _hostname: str) -> Allocation | None:
        reader = Reader(variables)
        job_id = reader.text(JOB_ID)
        if job_id is None:
            return None
        count = reader.required_number(*NODE_COUNT, hint=_START_WITH_SRUN)
        hosts = _hosts(reader)
        in_step = reader.text(STEP_ID) is not None
        if count > 1 or in_step:
            rank = reader.required_number(NODE_RANK, hint=_START_WITH_SRUN)
        else:
            rank = reader.number(NODE_RANK) or 0  # one node, outside a step: there is only one place to be
        if count > 1 and not in_step:
            raise DetectionError(
                f"{JOB_ID} is {job_id} with {count} nodes, but {STEP_ID} is not set: this runs on one node only",
                hint=_START_WITH_SRUN,
            )
        local_rank = reader.required_number(LOCAL_RANK, hint=_START_WITH_SRUN) if in_step else 0
        return Allocation(
            environment=cls.name,
            job_id=f"{job_id}.{reader.used[STEP_ID]}" if in_step else job_id,
            node_count=count,
            node_rank=rank,
            local_rank=local_rank,
            hosts=hosts,
            head=hosts[0],
            variables=reader.used,
        )


def _hosts(reader: Reader) -> tuple[str, ...]:
    text = reader.text(*NODE_LIST)
    if text is None:
        raise DetectionError(f"{' and '.join(NODE_LIST)} are not set", hint=_START_WITH_SRUN)
    try:
        return tuple(expand(text))
    except HostlistError as error:
        name = next(name for name in NODE_LIST if name in reader.used)
        raise DetectionError(f"{name} is {text!r}: {error}") from error
