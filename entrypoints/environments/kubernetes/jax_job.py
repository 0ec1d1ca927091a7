"""Kubeflow's JAXJob: all its replicas are workers, and worker 0 is the coordinator."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.counted import counted
from entrypoints.environments.process_view import ProcessView, Reader

HEAD = ("COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS")
COUNT = ("NUM_PROCESSES", "JAX_NUM_PROCESSES")
NODE_RANK = ("PROCESS_ID", "JAX_PROCESS_ID")

_HINT = "the training operator sets it in every worker; JAX's own names start with JAX_"


class JaxJob(Environment):
    name = "jax_job"
    precedence = 524
    title = "Kubeflow JAXJob"
    reads = (*HEAD, *COUNT, *NODE_RANK)
    caveats = "NUM_PROCESSES counts pods. JAX's own variables are read too, for one process per node."
    start = "command of the Worker template: LAUNCH"
    source = "https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/jax/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        for head, count, rank in zip(HEAD, COUNT, NODE_RANK, strict=True):
            reader = Reader(view.variables)
            name = reader.host(head)
            if name is None or not view.variables.get(count):
                continue
            return counted(cls.name, view, reader, count=count, rank=rank, head=name, job_id=name, hint=_HINT)
        return None
