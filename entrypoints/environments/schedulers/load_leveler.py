"""IBM's LoadLeveler."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.environments.schedulers.node_file import by_node_file

JOB_ID = "LOADL_STEP_ID"
NODE_FILE = "LOADL_HOSTFILE"


class LoadLeveler(Environment):
    name = "load_leveler"
    precedence = 265
    job_id_variable = JOB_ID
    title = "LoadLeveler"
    reads = (JOB_ID, NODE_FILE)
    caveats = "The host file has one line per task. LOADL_TOTAL_TASKS counts tasks."
    start = "mpirun --hostfile $LOADL_HOSTFILE --map-by ppr:1:node LAUNCH"
    source = "https://github.com/pmodels/mpich/blob/main/src/pm/hydra/lib/tools/bootstrap/external/ll_query_node_list.c"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = reader.text(JOB_ID)
        if job_id is None:
            return None
        return by_node_file(
            cls.name, view, reader, job_id=job_id, path=NODE_FILE, start=cls.start.replace("LAUNCH", "launch ...")
        )
