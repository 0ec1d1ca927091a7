"""OAR, the batch system of Grid'5000. It runs the job's script on the first node."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.environments.schedulers.node_file import by_node_file

JOB_ID = "OAR_JOB_ID"
NODE_FILE = ("OAR_NODEFILE", "OAR_NODE_FILE", "OAR_FILE_NODES")


class Oar(Environment):
    name = "oar"
    precedence = 250
    job_id_variable = JOB_ID
    title = "OAR"
    reads = (JOB_ID, NODE_FILE[0])
    caveats = "The node file has one line per resource, often a core. Mount it into the container."
    start = "mpirun --hostfile $OAR_NODEFILE --mca plm_rsh_agent oarsh --map-by ppr:1:node LAUNCH"
    source = "https://oar.imag.fr/docs/latest/user/commands/oarsub.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = reader.text(JOB_ID)
        if job_id is None:
            return None
        path = next((name for name in NODE_FILE if view.variables.get(name)), NODE_FILE[0])
        return by_node_file(
            cls.name, view, reader, job_id=job_id, path=path, start=cls.start.replace("LAUNCH", "launch ...")
        )
