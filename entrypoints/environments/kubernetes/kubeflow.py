"""Kubeflow Trainer v2 (TrainJob): torchrun's PET_ variables in the pods of a JobSet."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader

NODE_COUNT = "PET_NNODES"
NODE_RANK = "PET_NODE_RANK"
HEAD = "PET_MASTER_ADDR"
MARKS = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")

_HINT = "the trainer's torch runtime sets these variables: see `kubectl describe trainjob`"


class Kubeflow(Environment):
    name = "kubeflow"
    precedence = 530
    title = "Kubeflow Trainer v2"
    reads = (NODE_COUNT, NODE_RANK, HEAD)
    caveats = "PET_NPROC_PER_NODE is for torchrun only."
    start = "spec.trainer.command: LAUNCH"
    source = "https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text(NODE_COUNT) is None or not any(view.variables.get(mark) for mark in MARKS):
            return None
        head = reader.required_host(HEAD, hint=_HINT)
        return Allocation(
            environment=cls.name,
            job_id=head.split(".")[0],
            node_count=reader.required_number(NODE_COUNT, hint=_HINT),
            node_rank=reader.required_number(NODE_RANK, hint=_HINT),
            head=head,
            variables=reader.used,
        )
