"""IBM Spectrum LSF: `mpirun`, `blaunch` on each host, or `jsrun` (Spectrum MPI's job step manager).

LSF starts one process, on the first host; its lists have one entry per slot. With jsrun, the list starts with the
launch node, which runs the batch script and no task.
"""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.host_names import host_name, host_names, in_file
from entrypoints.environments.mpi.tasks import started_by_mpi
from entrypoints.environments.process_view import ProcessView, Reader, distinct, nodes_of_tasks, rank_of
from entrypoints.errors import DetectionError, NodesUnknownError

JOB_ID = "LSB_JOBID"
ARRAY_INDEX = "LSB_JOBINDEX"
HOST_FILE = "LSB_DJOB_HOSTFILE"
SLOTS = "LSB_MCPU_HOSTS"
HOSTS = "LSB_HOSTS"
BLAUNCH_TASK = "LSF_PM_TASKID"
JSM = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")

_ONE_PER_HOST = 'blaunch -z "$(xargs -n1 <<<$LSB_HOSTS | uniq | xargs)" launch ...'
_HINT = f"start one task per host: {_ONE_PER_HOST}, or jsrun -r 1 -a 1 launch ..."


class Lsf(Environment):
    name = "lsf"
    precedence = 210
    job_id_variable = JOB_ID
    array_index_variable = ARRAY_INDEX
    title = "LSF (mpirun, blaunch, jsrun)"
    reads = (JOB_ID, HOST_FILE, SLOTS, HOSTS, BLAUNCH_TASK, *JSM)
    caveats = (
        "LSF starts one process, on the first host. With jsrun, the list starts with the launch node, which runs no "
        "task."
    )
    start = _ONE_PER_HOST.replace("launch ...", "LAUNCH")
    source = "https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-variable-reference"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = cls.scheduler_job_id(view.variables)
        if job_id is None:
            return None
        reader.text(JOB_ID)
        hosts, source = _hosts(view, reader)
        if view.variables.get(JSM[0]):
            return _below_jsrun(reader, job_id, hosts, source)
        by_mpi = started_by_mpi(view.variables)
        if by_mpi and view.place_in(hosts) is None:
            return None
        rank = rank_of(view, hosts, source)
        started = by_mpi or reader.text(BLAUNCH_TASK) is not None
        return Allocation(
            environment=cls.name,
            job_id=job_id,
            node_count=len(hosts),
            node_rank=rank,
            hosts=hosts,
            head=hosts[0],
            batch_script=not started,
            alone=_ONE_PER_HOST if rank == 0 and len(hosts) > 1 and not started else "",
            variables=reader.used,
        )


def _hosts(view: ProcessView, reader: Reader) -> tuple[tuple[str, ...], str]:
    """The hosts in LSF's order, and the variable that tells them."""
    if (path := reader.text(HOST_FILE)) and (lines := view.lines(path)):
        return in_file(lines, HOST_FILE), HOST_FILE
    reader.used.pop(HOST_FILE, None)
    if text := reader.text(SLOTS):
        names, slots = text.split()[::2], text.split()[1::2]
        if len(names) != len(slots) or not all(slot.isdigit() for slot in slots):
            raise DetectionError(f"{SLOTS} is {text!r}, not pairs of a host and its slots")
        return distinct([host_name(name, SLOTS) for name in names]), SLOTS
    if (text := reader.text(HOSTS)) is None:
        raise NodesUnknownError(f"{HOSTS} is not set", hint=f"pass {SLOTS} into the container")
    return distinct(host_names(text, HOSTS)), HOSTS


def _below_jsrun(reader: Reader, job_id: str, hosts: tuple[str, ...], source: str) -> Allocation:
    task, size = (reader.required_number(name, hint=_HINT) for name in JSM[:2])
    local, local_size = (reader.number(name) for name in JSM[2:])
    if local is None or local_size is None:  # the hosts after the launch node share the tasks
        local_size = max(1, size // max(1, len(hosts) - 1))
        local = task % local_size
    count, rank = nodes_of_tasks(task, size, local, local_size)
    if len(hosts) == count + 1:
        hosts = hosts[1:]
    if len(hosts) > count:
        raise DetectionError(f"{source} lists {len(hosts)} hosts, but jsrun uses {count} of them", hint=_HINT)
    return Allocation(
        environment=Lsf.name,
        job_id=job_id,
        node_count=count,
        node_rank=rank,
        local_rank=local,
        task_count=size,
        hosts=hosts,
        head=hosts[0],
        variables=reader.used,
    )
