"""Flux: tasks of `flux run`, and batch scripts, in which Flux unsets nearly all variables.

FLUX_JOB_ID is text (`ƒ2mLc…`), not a number. No variable tells the hosts: the `flux` command does, if the container has
it. Otherwise the user must name the head.
"""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi.tasks import started_by_mpi
from entrypoints.environments.process_view import ProcessView, Reader, nodes_of_tasks
from entrypoints.errors import DetectionError, NodesUnknownError
from entrypoints.hostlist import HostlistError, expand

URI = "FLUX_URI"
JOB_ID = "FLUX_JOB_ID"
NODE_COUNT = "FLUX_JOB_NNODES"
SIZE = "FLUX_JOB_SIZE"
TASK = "FLUX_TASK_RANK"
LOCAL_RANK = "FLUX_TASK_LOCAL_ID"

_START = "flux run -N{count} --tasks-per-node=1 launch ..."
_HINT = "start one task per node: flux run -N NODES --tasks-per-node=1 launch ..."


class Flux(Environment):
    name = "flux"
    precedence = 190
    job_id_variable = JOB_ID
    title = "Flux (jobs and batch scripts)"
    reads = (JOB_ID, NODE_COUNT, SIZE, TASK, LOCAL_RANK, URI, "flux getattr hostlist")
    caveats = (
        "FLUX_JOB_ID is not a number, and it is unset in batch scripts. The hosts come from the `flux` command; "
        "without it, set SLIPWAY_HEAD; a batch script is then refused."
    )
    start = "flux run -N2 --tasks-per-node=1 LAUNCH"
    source = "https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = reader.text(JOB_ID)
        if job_id is None:
            return _batch_script(view, reader)
        count = reader.required_number(NODE_COUNT, hint=_HINT)
        size = reader.number(SIZE) or count
        local = reader.number(LOCAL_RANK)
        if local is None:
            if size != count:
                raise DetectionError(f"{LOCAL_RANK} is not set for {size} tasks on {count} nodes", hint=_HINT)
            local = 0  # one task per node
        task = reader.required_number(TASK, hint=_HINT)
        if count < 1 or size % count:
            raise DetectionError(f"{SIZE} is {size}, not a multiple of {NODE_COUNT} {count}", hint=_HINT)
        _, rank = nodes_of_tasks(task, size, local, size // count)
        hosts = _hosts(view, ("flux", "job", "hostlist", job_id))
        hosts = hosts if hosts is not None and len(hosts) == count else None
        return Allocation(
            environment=cls.name,
            job_id=job_id,
            node_count=count,
            node_rank=rank,
            local_rank=local,
            task_count=size,
            hosts=hosts,
            head=hosts[0] if hosts else None,
            variables=reader.used,
        )


def _batch_script(view: ProcessView, reader: Reader) -> Allocation | None:
    """The allocation of a `flux batch` or `flux alloc` instance's first process; None outside of Flux and below mpirun.

    Raises NodesUnknownError if the `flux` command does not tell the hosts.
    """
    if reader.text(URI) is None or started_by_mpi(view.variables):
        return None
    hosts = _hosts(view, ("flux", "getattr", "hostlist"))
    if hosts is None:
        raise NodesUnknownError(
            f"{URI} is set, but the `flux` command, which tells the nodes, is missing here or gets no answer",
            hint=f"{_HINT}; or list the nodes in SLIPWAY_HOSTS; --single runs on this node alone",
        )
    return Allocation(
        environment=Flux.name,
        job_id=view.ask("flux", "getattr", "jobid") or reader.used[URI],
        node_count=len(hosts),
        node_rank=0,
        hosts=hosts,
        head=hosts[0],
        batch_script=True,
        alone=_START.format(count=len(hosts)) if len(hosts) > 1 else "",
        variables=reader.used,
    )


def _hosts(view: ProcessView, command: tuple[str, ...]) -> tuple[str, ...] | None:
    answer = view.ask(*command)
    if not answer:
        return None
    try:
        return tuple(expand(answer))
    except HostlistError as error:
        raise DetectionError(f"`{' '.join(command)}` says {answer!r}: {error}") from error
