"""horovodrun with Gloo: the cross rank counts nodes. With MPI, horovodrun calls mpirun, whose variables decide."""

from entrypoints.environments.base import Allocation, Environment, scheduler_job_id
from entrypoints.environments.mpi.tasks import ONE_PER_NODE
from entrypoints.environments.process_view import ProcessView, Reader

RANK = "HOROVOD_RANK"
SIZE = "HOROVOD_SIZE"
NODE_RANK = "HOROVOD_CROSS_RANK"
NODE_COUNT = "HOROVOD_CROSS_SIZE"
LOCAL_RANK = "HOROVOD_LOCAL_RANK"
PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"


class Horovod(Environment):
    name = "horovod"
    precedence = 450
    title = "Horovod (Gloo)"
    reads = (RANK, SIZE, NODE_RANK, NODE_COUNT, LOCAL_RANK, PORT)
    caveats = (
        "No variable names the head: set SLIPWAY_HEAD. HOROVOD_GLOO_RENDEZVOUS_ADDR is the machine of horovodrun, "
        "which may run no task."
    )
    start = "SLIPWAY_HEAD=gpu-0 horovodrun -np 2 -H gpu-0:1,gpu-1:1 LAUNCH"
    source = "https://horovod.readthedocs.io/en/stable/api.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text(RANK) is None:
            return None
        count = reader.required_number(NODE_COUNT, hint=ONE_PER_NODE)
        return Allocation(
            environment=cls.name,
            job_id=scheduler_job_id(view.variables) or f"horovod:{reader.text(PORT) or ''}",
            node_count=count,
            node_rank=reader.required_number(NODE_RANK, hint=ONE_PER_NODE),
            local_rank=reader.required_number(LOCAL_RANK, hint=ONE_PER_NODE),
            task_count=reader.required_number(SIZE, hint=ONE_PER_NODE),
            head=view.hostname if count == 1 else None,
            variables=reader.used,
        )
