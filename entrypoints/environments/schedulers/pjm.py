"""Fujitsu's Technical Computing Suite (PJM): Fugaku, Flow, Wisteria, ABCI's and Kyushu's GPU systems of that kind."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.environments.schedulers.node_file import by_node_file

JOB_ID = "PJM_JOBID"
NODE_FILE = "PJM_O_NODEINF"


class Pjm(Environment):
    name = "pjm"
    precedence = 255
    job_id_variable = JOB_ID
    title = "Fujitsu TCS (PJM)"
    reads = (JOB_ID, NODE_FILE)
    caveats = "PJM_MPI_PROC counts processes. Mount the node file into the container."
    start = "mpirun -machinefile $PJM_O_NODEINF --mca plm_rsh_agent /bin/pjrsh --map-by ppr:1:node LAUNCH"
    source = "https://www.cc.u-tokyo.ac.jp/en/supercomputer/wisteria/service/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = reader.text(JOB_ID)
        if job_id is None:
            return None
        return by_node_file(
            cls.name, view, reader, job_id=job_id, path=NODE_FILE, start=cls.start.replace("LAUNCH", "launch ...")
        )
