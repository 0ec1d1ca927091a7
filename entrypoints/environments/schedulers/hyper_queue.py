"""HyperQueue's multi-node tasks. Its workers run inside jobs of Slurm or PBS, whose variables its tasks inherit."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.environments.schedulers.node_file import by_node_file

JOB_ID = "HQ_JOB_ID"
TASK_ID = "HQ_TASK_ID"
INSTANCE = "HQ_INSTANCE_ID"
NODE_FILE = "HQ_NODE_FILE"


class HyperQueue(Environment):
    name = "hyper_queue"
    precedence = 195
    title = "HyperQueue (multi-node tasks)"
    reads = (JOB_ID, TASK_ID, INSTANCE, NODE_FILE)
    caveats = "A task's command runs on its first node only. Tasks on a single node have no node file."
    start = "mpirun --hostfile $HQ_NODE_FILE --map-by ppr:1:node -x SLIPWAY_TOKEN LAUNCH"
    run_under = "HyperQueue 0.27"
    source = "https://it4innovations.github.io/hyperqueue/stable/jobs/multinode/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = reader.text(JOB_ID)
        if job_id is None or not view.variables.get(NODE_FILE):
            return None
        parts = (job_id, *(view.variables.get(name, "0") for name in (TASK_ID, INSTANCE)))
        return by_node_file(
            cls.name, view, reader, job_id=f"hq-{'.'.join(parts)}", path=NODE_FILE,
            start=cls.start.replace("LAUNCH", "launch ..."),
        )  # fmt: skip
