"""Grid Engine and its descendants (Son of Grid Engine, Univa, Altair).

PE_HOSTFILE has one line per host: name, slots, queue, processors. The file is in the spool directory of the first host,
often on its local disk. `mpirun` passes the variable to all tasks, `qrsh -inherit` only with -V. Without -noshell, a
shell splits the command's words again.
"""

from collections.abc import Mapping

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.host_names import in_file
from entrypoints.environments.mpi.tasks import started_by_mpi
from entrypoints.environments.process_view import ProcessView, Reader, rank_of
from entrypoints.errors import NodesUnknownError

JOB_ID = "JOB_ID"
HOST_FILE = "PE_HOSTFILE"
PARALLEL_ENVIRONMENT = "PE"
SCRIPT = "JOB_SCRIPT"
ARRAY_TASK = "SGE_TASK_ID"
MARKS = ("SGE_ROOT", ARRAY_TASK, HOST_FILE)

_MPIRUN = "mpirun --map-by ppr:1:node"
_SCRIPT = f"""{_MPIRUN} LAUNCH
# or without MPI
hosts=$(cut -d' ' -f1 $PE_HOSTFILE | paste -sd,)
for host in $(echo $hosts | tr , ' '); do qrsh -inherit -noshell -V $host launch --hosts $hosts … & done
wait $!; status=$?; wait; exit $status"""
_START = f"{_MPIRUN} launch ..., or for each host: qrsh -inherit -noshell -V HOST launch --hosts A,B ..."


class GridEngine(Environment):
    name = "grid_engine"
    precedence = 230
    job_id_variable = JOB_ID
    array_index_variable = ARRAY_TASK
    title = "Grid Engine"
    reads = (JOB_ID, ARRAY_TASK, PARALLEL_ENVIRONMENT, HOST_FILE, SCRIPT)
    caveats = (
        "NSLOTS counts slots, and NHOSTS is 1 on every host but the first. The host file is often on the first host "
        "only, so tasks of `qrsh -inherit` get their hosts from --hosts."
    )
    run_under = "Grid Engine 8.1.9"
    start = _SCRIPT
    source = "https://manpages.debian.org/bookworm/gridengine-client/submit.1.en.html"

    @classmethod
    def scheduler_job_id(cls, variables: Mapping[str, str]) -> str | None:
        """None without one of Grid Engine's own variables, as other programs set JOB_ID too."""
        complete = any(variables.get(name) for name in (HOST_FILE, PARALLEL_ENVIRONMENT, ARRAY_TASK))
        return super().scheduler_job_id(variables) if complete else None

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if not any(view.variables.get(mark) for mark in MARKS) or reader.text(JOB_ID) is None:
            return None
        hosts = _hosts(view, reader)
        by_mpi = started_by_mpi(view.variables)
        if hosts is None or (by_mpi and view.place_in(hosts) is None):
            return None
        rank = rank_of(view, hosts, HOST_FILE) if len(hosts) > 1 else 0
        batch_script = not by_mpi and reader.text(SCRIPT) != "QRSH"
        warnings = []
        if len(hosts) > 1 and rank == 0 and batch_script:
            warnings.append(f"a job script runs on the first host only; start all hosts with {_START}")
        return Allocation(
            environment=cls.name,
            job_id=cls.scheduler_job_id(view.variables) or view.variables[JOB_ID],
            node_count=len(hosts),
            node_rank=rank,
            hosts=hosts,
            head=hosts[0],
            batch_script=batch_script,
            warnings=tuple(warnings),
            variables=reader.used,
        )


def _hosts(view: ProcessView, reader: Reader) -> tuple[str, ...] | None:
    path, parallel = reader.text(HOST_FILE), reader.text(PARALLEL_ENVIRONMENT)
    if path is None and parallel is None:
        return (view.hostname,)
    lines = view.lines(path) if path is not None else None
    if lines:
        return in_file(lines, HOST_FILE)
    if started_by_mpi(view.variables):
        return None
    if path is None:
        raise NodesUnknownError(f"{HOST_FILE} is not set for this task of {parallel}", hint=f"start it with {_START}")
    raise NodesUnknownError(
        f"{HOST_FILE} is {path}, which cannot be read here",
        hint=f"mount it into the first host's container, and start the tasks with {_START}",
    )
