"""Cobalt, the batch system of Argonne's earlier machines."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.environments.schedulers.node_file import by_node_file

JOB_ID = "COBALT_JOBID"
NODE_FILE = "COBALT_NODEFILE"


class Cobalt(Environment):
    name = "cobalt"
    precedence = 260
    job_id_variable = JOB_ID
    title = "Cobalt"
    reads = (JOB_ID, NODE_FILE)
    caveats = "The job's script runs on the first node only. COBALT_JOBSIZE counts nodes."
    start = "mpirun --hostfile $COBALT_NODEFILE --map-by ppr:1:node LAUNCH"
    source = (
        "https://github.com/pmodels/mpich/blob/main/src/pm/hydra/lib/tools/bootstrap/external/cobalt_query_node_list.c"
    )

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = reader.text(JOB_ID)
        if job_id is None:
            return None
        return by_node_file(
            cls.name, view, reader, job_id=job_id, path=NODE_FILE, start=cls.start.replace("LAUNCH", "launch ...")
        )
