"""SkyPilot tasks."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError

ADDRESSES = "SKYPILOT_NODE_IPS"
NODE_RANK = "SKYPILOT_NODE_RANK"
COUNT = "SKYPILOT_NUM_NODES"
TASK = ("SKYPILOT_TASK_ID", "SKYPILOT_INTERNAL_JOB_ID")

_HINT = "SkyPilot sets it in `run:`; pass SKYPILOT_* into the container"


class SkyPilot(Environment):
    name = "skypilot"
    precedence = 330
    title = "SkyPilot"
    reads = (ADDRESSES, NODE_RANK, COUNT, TASK[0])
    caveats = "One variable has one address per line. SKYPILOT_NUM_GPUS_PER_NODE counts GPUs, not tasks."
    start = "run: docker run --network host --env-file <(env | grep -E '^(SKYPILOT|SLIPWAY)_' …) IMAGE …"
    source = "https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        hosts = reader.hosts(ADDRESSES)
        if not hosts:
            return None
        count = reader.number(COUNT)
        if count == 1:
            hosts = (view.hostname,)  # on Slurm the list has all nodes of the cluster
        if count is not None and count != len(hosts):
            raise DetectionError(
                f"{COUNT} is {count}, but {ADDRESSES} lists {len(hosts)}: {' '.join(hosts)}", hint=_HINT
            )
        return Allocation(
            environment=cls.name,
            job_id=reader.text(*TASK) or hosts[0],
            node_count=len(hosts),
            node_rank=0 if count == 1 else reader.required_number(NODE_RANK, hint=_HINT),
            hosts=hosts,
            head=hosts[0],
            variables=reader.used,
        )
