"""HPE's PALS, the mpiexec of Cray systems without Slurm."""

from entrypoints.environments.base import Allocation, Environment, scheduler_job_id
from entrypoints.environments.mpi.tasks import ONE_PER_NODE
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError

RANK = "PALS_RANKID"
NODE_RANK = "PALS_NODEID"
LOCAL_RANK = "PALS_LOCAL_RANKID"
JOB_ID = "PALS_APID"
SIZE = ("PMI_SIZE", "PALS_SIZE")
LOCAL_SIZE = ("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE")


class Pals(Environment):
    name = "pals"
    precedence = 430
    title = "PALS (HPE Cray)"
    reads = (RANK, NODE_RANK, LOCAL_RANK, JOB_ID, SIZE[0], LOCAL_SIZE[0])
    caveats = "No variable names the head. In a PBS job the node file does; otherwise set SLIPWAY_HEAD."
    start = "mpiexec -ppn 1 --env SLIPWAY_HEAD=$(hostname) LAUNCH"
    source = "https://cpe.ext.hpe.com/docs/latest/pals/index.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text(RANK) is None or view.variables.get("SLURM_STEP_ID"):  # Slurm sets it too on Cray systems
            return None
        size = reader.required_number(*SIZE, hint=ONE_PER_NODE)
        local_size = reader.number(*LOCAL_SIZE) or 1
        if size % local_size:
            raise DetectionError(f"{SIZE[0]} is {size}, not a multiple of {LOCAL_SIZE[0]} {local_size}", ONE_PER_NODE)
        count = size // local_size
        return Allocation(
            environment=cls.name,
            job_id=scheduler_job_id(view.variables) or reader.text(JOB_ID) or "pals",
            node_count=count,
            node_rank=reader.required_number(NODE_RANK, hint=ONE_PER_NODE),
            local_rank=reader.required_number(LOCAL_RANK, hint=ONE_PER_NODE),
            head=view.hostname if count == 1 else None,
            variables=reader.used,
        )
