"""PBS Professional, OpenPBS, Torque, and NEC's NQSV, whose job ids start with the number of the node: `0:77.server`.

PBS_NODEFILE has one line per slot (mpiprocs) and often exists on the first node only. On the others the variables of
the MPI launcher that started the task must tell the node.
"""

import re
from collections.abc import Mapping

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.environments.schedulers.node_file import by_node_file

JOB_ID = "PBS_JOBID"
NODE_FILE = "PBS_NODEFILE"
TASK = "PBS_TASKNUM"

_ONE_PER_NODE = (
    "mpirun --map-by ppr:1:node launch ... (Open MPI), mpiexec -ppn 1 -genv SLIPWAY_HEAD $(hostname) launch ... "
    "(MPICH, Intel MPI)"
)
"""Not pbsdsh: it passes neither the user's variables on nor the node file, which only the first node has."""


class Pbs(Environment):
    name = "pbs"
    precedence = 220
    job_id_variable = JOB_ID
    title = "PBS, Torque, NQSV"
    reads = (JOB_ID, NODE_FILE, TASK)
    caveats = "The node file has one line per slot and may exist on the first node only. Mount it into the container."
    start = "mpirun --map-by ppr:1:node LAUNCH"
    source = "https://2021.help.altair.com/2021.1/PBSProfessional/PBSUserGuide2021.1.pdf"

    @classmethod
    def scheduler_job_id(cls, variables: Mapping[str, str]) -> str | None:
        """The job's id without NQSV's number of the node."""
        job_id = super().scheduler_job_id(variables)
        return job_id and re.sub(r"^\d+:", "", job_id)

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = cls.scheduler_job_id(view.variables)
        if job_id is None:
            return None
        reader.text(JOB_ID)
        started = reader.number(TASK) not in (None, 1)  # by pbsdsh
        return by_node_file(cls.name, view, reader, job_id=job_id, path=NODE_FILE, start=_ONE_PER_NODE, started=started)
