"""Batch systems that name a file with the job's hosts and start one process, on the first of them: a row each."""

from typing import ClassVar

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.host_names import in_file
from entrypoints.environments.mpi.tasks import started_by_mpi
from entrypoints.environments.other_nodes import LIST_THEM
from entrypoints.environments.process_view import ProcessView, Reader, rank_of
from entrypoints.errors import NodesUnknownError


def by_node_file(
    environment: str, view: ProcessView, reader: Reader, *, job_id: str, path: str, start: str, started: bool = False
) -> Allocation | None:
    """The allocation from the node file in the variable `path`, which has one line per slot.

    `start` is the command that starts one task per node; `started` says that it did. Returns None for a task of an MPI
    launcher that cannot read the file, or is not in it: the launcher tells the nodes itself. For others that is a
    NodesUnknownError.
    """
    by_mpi = started_by_mpi(view.variables)
    place = reader.text(path)
    lines = view.lines(place) if place is not None else None
    if not lines:
        if by_mpi:
            return None
        if place is None:
            raise NodesUnknownError(
                f"{path} is not set", f"pass it into the container, and mount the file that it names; or {LIST_THEM}"
            )
        raise NodesUnknownError(
            f"{path} is {place}, which cannot be read here",
            f"mount it into the container, from a shared directory if it exists on the first node only; or {LIST_THEM}",
        )
    hosts = in_file(lines, path)
    if by_mpi and view.place_in(hosts) is None:
        return None
    rank = rank_of(view, hosts, path)
    return Allocation(
        environment=environment,
        job_id=job_id,
        node_count=len(hosts),
        node_rank=rank,
        hosts=hosts,
        head=hosts[0],
        batch_script=not by_mpi and not started,
        alone=start if rank == 0 and len(hosts) > 1 and not by_mpi and not started else "",
        variables=reader.used,
    )


class NodeFile(Environment):
    """A row of the table. The batch system is present if its job id is set."""

    node_file: ClassVar[tuple[str, ...]]
    """Variables with the path of the file; the first that is set counts."""

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = reader.text(cls.job_id_variable)
        if job_id is None:
            return None
        path = next((name for name in cls.node_file if view.variables.get(name)), cls.node_file[0])
        start = cls.start.replace("LAUNCH", "launch ...")
        return by_node_file(cls.name, view, reader, job_id=job_id, path=path, start=start)


class Oar(NodeFile):
    name = "oar"
    precedence = 250
    title = "OAR"
    job_id_variable, node_file = "OAR_JOB_ID", ("OAR_NODEFILE", "OAR_NODE_FILE", "OAR_FILE_NODES")
    reads = (job_id_variable, node_file[0])
    caveats = "The node file has one line per resource, often a core. Mount it into the container."
    start = "mpirun --hostfile $OAR_NODEFILE --mca plm_rsh_agent oarsh --map-by ppr:1:node LAUNCH"
    source = "https://oar.imag.fr/docs/latest/user/commands/oarsub.html"


class Pjm(NodeFile):
    name = "pjm"
    precedence = 255
    title = "Fujitsu TCS (PJM)"
    job_id_variable, node_file = "PJM_JOBID", ("PJM_O_NODEINF",)
    reads = (job_id_variable, *node_file)
    caveats = "PJM_MPI_PROC counts processes. Mount the node file into the container."
    start = "mpirun -machinefile $PJM_O_NODEINF --mca plm_rsh_agent /bin/pjrsh --map-by ppr:1:node LAUNCH"
    source = "https://www.cc.u-tokyo.ac.jp/en/supercomputer/wisteria/service/"


class Cobalt(NodeFile):
    name = "cobalt"
    precedence = 260
    title = "Cobalt"
    job_id_variable, node_file = "COBALT_JOBID", ("COBALT_NODEFILE",)
    reads = (job_id_variable, *node_file)
    caveats = "The job's script runs on the first node only. COBALT_JOBSIZE counts nodes."
    start = "mpirun --hostfile $COBALT_NODEFILE --map-by ppr:1:node LAUNCH"
    source = (
        "https://github.com/pmodels/mpich/blob/main/src/pm/hydra/lib/tools/bootstrap/external/cobalt_query_node_list.c"
    )


class LoadLeveler(NodeFile):
    name = "load_leveler"
    precedence = 265
    title = "LoadLeveler"
    job_id_variable, node_file = "LOADL_STEP_ID", ("LOADL_HOSTFILE",)
    reads = (job_id_variable, *node_file)
    caveats = "The host file has one line per task. LOADL_TOTAL_TASKS counts tasks."
    start = "mpirun --hostfile $LOADL_HOSTFILE --map-by ppr:1:node LAUNCH"
    source = "https://github.com/pmodels/mpich/blob/main/src/pm/hydra/lib/tools/bootstrap/external/ll_query_node_list.c"
