"""NVIDIA DGX Cloud Lepton's batch jobs: worker `i` is `<prefix>-<i>.<subdomain>`."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.counted import counted
from entrypoints.environments.process_view import ProcessView, Reader

COUNT = "LEPTON_JOB_TOTAL_WORKERS"
NODE_RANK = "LEPTON_JOB_WORKER_INDEX"
PREFIX = ("LEPTON_JOB_WORKER_PREFIX", "LEPTON_JOB_WORKER_HOSTNAME_PREFIX")
SUBDOMAIN = "LEPTON_SUBDOMAIN"
JOB = "LEPTON_JOB_NAME"

_HINT = "Lepton sets it in batch jobs; enable communication between the workers"


class Lepton(Environment):
    name = "lepton"
    precedence = 355
    title = "DGX Cloud Lepton"
    reads = (COUNT, NODE_RANK, PREFIX[0], SUBDOMAIN, JOB)
    caveats = "The workers have names only if the job enables communication between them."
    start = "run command of the batch job: LAUNCH"
    source = "https://docs.nvidia.com/dgx-cloud/lepton/features/batch-jobs/predefined-env-vars"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        count = reader.number(COUNT)
        if count is None:
            return None
        hosts = []
        if count > 1:
            prefix, subdomain = (reader.required(*names, hint=_HINT) for names in (PREFIX, (SUBDOMAIN,)))
            hosts = [f"{prefix}-{index}.{subdomain}" for index in range(count)]
        return counted(
            cls.name, view, reader, count=COUNT, rank=NODE_RANK,
            head=hosts[0] if hosts else None, job_id=reader.text(JOB), hosts=hosts, hint=_HINT,
        )  # fmt: skip
