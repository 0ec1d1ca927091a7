"""PBS Professional, OpenPBS and Torque.

PBS_NODEFILE has one line per slot (mpiprocs) and often exists on the first node only. On the others the variables of
the MPI launcher that started the task must tell the node.
"""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi.tasks import local_rank, started_by_mpi
from entrypoints.environments.process_view import ProcessView, Reader, distinct, rank_of
from entrypoints.errors import DetectionError

JOB_ID = "PBS_JOBID"
NODE_FILE = "PBS_NODEFILE"
TASK = "PBS_TASKNUM"

_ONE_PER_NODE = "mpirun --map-by ppr:1:node launch ..., or pbsdsh -u launch ..."


class Pbs(Environment):
    name = "pbs"
    precedence = 220
    job_id_variable = JOB_ID
    title = "PBS, Torque"
    reads = (JOB_ID, NODE_FILE, TASK)
    caveats = "The node file has one line per slot and may exist on the first node only. Mount it into the container."
    start = "mpirun --map-by ppr:1:node LAUNCH"
    source = "https://2021.help.altair.com/2021.1/PBSProfessional/PBSUserGuide2021.1.pdf"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = reader.text(JOB_ID)
        if job_id is None:
            return None
        path = reader.required(NODE_FILE, hint="pass the PBS_ variables into the container")
        lines = view.lines(path)
        if not lines:
            if started_by_mpi(view.variables):
                return None
            raise DetectionError(
                f"{NODE_FILE} is {path}, which cannot be read here",
                hint="mount it into the container, from a shared directory if it exists on the first node only",
            )
        hosts = distinct(lines)
        rank = rank_of(view, hosts, NODE_FILE)
        alone = ""
        if rank == 0 and len(hosts) > 1 and not started_by_mpi(view.variables) and reader.number(TASK) in (None, 1):
            alone = _ONE_PER_NODE
        return Allocation(
            environment=cls.name,
            job_id=job_id,
            node_count=len(hosts),
            node_rank=rank,
            local_rank=local_rank(reader),
            hosts=hosts,
            head=hosts[0],
            alone=alone,
            variables=reader.used,
        )
