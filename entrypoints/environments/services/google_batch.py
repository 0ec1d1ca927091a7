"""Google Cloud Batch: the tasks of a group, one per VM, with a file of the VMs' names."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.host_names import in_file
from entrypoints.environments.process_view import ProcessView, Reader, rank_of
from entrypoints.errors import DetectionError

INDEX = "BATCH_TASK_INDEX"
COUNT = "BATCH_TASK_COUNT"
HOST_FILE = "BATCH_HOSTS_FILE"
JOB = ("BATCH_JOB_UID", "BATCH_JOB_ID")

_HINT = "set requireHostsFile and taskCountPerNode: 1 in the task group, and mount the file into the container"


class GoogleBatch(Environment):
    name = "google_batch"
    precedence = 380
    title = "Google Cloud Batch"
    reads = (HOST_FILE, COUNT, INDEX, *JOB)
    caveats = "Without requireHostsFile the tasks do not know each other: each is a job of its own, and needs --single."
    start = "taskGroups: [{taskCount: 2, parallelism: 2, taskCountPerNode: 1, requireHostsFile: true}]   # runs LAUNCH"
    source = "https://cloud.google.com/batch/docs/create-run-job-configuration"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        count = reader.number(COUNT)
        path = reader.text(HOST_FILE)
        if path is None:
            if count is None or count < 2 or not view.variables.get(INDEX):
                return None
            raise DetectionError(
                f"{COUNT} is {count}, but {HOST_FILE} is not set, so nothing names the hosts", hint=_HINT
            )
        hosts = in_file(view.lines(path) or [], HOST_FILE)
        if not hosts:
            raise DetectionError(f"{HOST_FILE} is {path}, which cannot be read here or is empty", hint=_HINT)
        return Allocation(
            environment=cls.name,
            job_id=reader.text(*JOB) or hosts[0],
            node_count=len(hosts),
            node_rank=rank_of(view, hosts, HOST_FILE),
            hosts=hosts,
            head=hosts[0],
            variables=reader.used,
        )
