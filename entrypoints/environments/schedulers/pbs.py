"""PBS Professional, OpenPBS and Torque.

PBS_NODEFILE has one line per slot (mpiprocs) and often exists on the first node only. On the others the variables of
the MPI launcher that started the task must tell the node.
"""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.environments.schedulers.node_file import by_node_file

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
        started = reader.number(TASK) not in (None, 1)  # by pbsdsh
        return by_node_file(cls.name, view, reader, job_id=job_id, path=NODE_FILE, start=_ONE_PER_NODE, started=started)
