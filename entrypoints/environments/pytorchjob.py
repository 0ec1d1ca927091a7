"""Kubeflow's PyTorchJob, and Alibaba's PAI-DLC, which names its variables alike.

RANK and WORLD_SIZE count **pods** here, not processes, unless the operator also sets torchrun's PET_ variables. The
sign is the master's name, `<job>-master-0`. Below torchrun (LOCAL_RANK) they count processes again: not this one.
"""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader

HEAD = ("PET_MASTER_ADDR", "MASTER_ADDR")
NODE_COUNT = ("PET_NNODES", "WORLD_SIZE")
NODE_RANK = ("PET_NODE_RANK", "RANK")

_MASTER = "-master-0"
_HINT = "these are set by the training operator; hand all of MASTER_ADDR, WORLD_SIZE and RANK into the container"


class PyTorchJob(Environment):
    name = "pytorchjob"
    precedence = 520
    title = "Kubeflow PyTorchJob, PAI-DLC"
    reads = (*HEAD, *NODE_COUNT, *NODE_RANK)
    beware = "RANK and WORLD_SIZE count pods; the master may be told that it is `localhost`."
    start = "command of the Master and Worker templates: LAUNCH"
    source = "https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        head = reader.text(*HEAD)
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
