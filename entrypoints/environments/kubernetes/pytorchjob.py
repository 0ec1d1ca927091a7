"""Kubeflow's PyTorchJob, and Alibaba's PAI-DLC with the same variables.

RANK and WORLD_SIZE count **pods** here, not processes. The master's name, `<job>-master-0`, identifies this
environment. Workers of torchrun have LOCAL_RANK and are not part of it: for them RANK and WORLD_SIZE count processes.
"""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader

HEAD = ("PET_MASTER_ADDR", "MASTER_ADDR")
NODE_COUNT = ("PET_NNODES", "WORLD_SIZE")
NODE_RANK = ("PET_NODE_RANK", "RANK")

_MASTER = "-master-0"
_HINT = "the training operator sets these variables; pass MASTER_ADDR, WORLD_SIZE and RANK into the container"


class PyTorchJob(Environment):
    name = "pytorchjob"
    precedence = 520
    title = "Kubeflow PyTorchJob, PAI-DLC"
    reads = (*HEAD, *NODE_COUNT, *NODE_RANK)
    caveats = "RANK and WORLD_SIZE count pods. On the master, MASTER_ADDR may be `localhost`."
    start = "command of the Master and Worker templates: LAUNCH"
    source = "https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        head = reader.host(*HEAD)
        if head in ("localhost", "127.0.0.1"):
            head = view.hostname
        if head is None or not head.split(".")[0].endswith(_MASTER) or view.variables.get("LOCAL_RANK"):
            return None
        return Allocation(
            environment=cls.name,
            job_id=head.split(".")[0].removesuffix(_MASTER),
            node_count=reader.required_number(*NODE_COUNT, hint=_HINT),
            node_rank=reader.required_number(*NODE_RANK, hint=_HINT),
            head=head,
            variables=reader.used,
        )
