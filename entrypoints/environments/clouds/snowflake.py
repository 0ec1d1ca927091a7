"""Snowflake's job services with several instances: ML Jobs with parallel=True name all of them."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.counted import counted
from entrypoints.environments.process_view import ProcessView, Reader

COUNT = "SNOWFLAKE_JOBS_COUNT"
NODE_RANK = "SNOWFLAKE_JOB_INDEX"
HEAD = "MLRS_HEAD_IP"
ADDRESSES = "MLRS_NODE_IPS"
JOB = "SNOWFLAKE_SERVICE_NAME"

_HINT = "submit an ML Job with target_instances and parallel=True, which sets MLRS_HEAD_IP, or set SLIPWAY_HEAD"


class Snowflake(Environment):
    name = "snowflake"
    precedence = 386
    title = "Snowflake ML Jobs (parallel)"
    reads = (COUNT, NODE_RANK, HEAD, ADDRESSES, JOB)
    caveats = "A job service that is no ML Job names no addresses: set SLIPWAY_HEAD. Instances have no host names."
    start = 'submit_directory(…, entrypoint=["bash", "-c", "LAUNCH"], target_instances=2, parallel=True)'
    source = "https://docs.snowflake.com/developer-guide/snowflake-ml/ml-jobs/overview"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text(COUNT) is None:
            return None
        hosts = reader.hosts(ADDRESSES)
        head = reader.host(HEAD) or (hosts[0] if hosts else None)
        return counted(
            cls.name, view, reader, count=COUNT, rank=NODE_RANK,
            head=head, job_id=reader.text(JOB), hosts=hosts, hint=_HINT,
        )  # fmt: skip
