"""Grid Engine and its descendants (Son of Grid Engine, Univa, Altair).

PE_HOSTFILE has a line per host: name, slots, queue, processors. Tasks are started by `mpirun` or `qrsh -inherit`.
"""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi import local_rank, started_by_mpi
from entrypoints.environments.place import Place, Reader, distinct, rank_of
from entrypoints.errors import DetectionError

JOB_ID = "JOB_ID"
HOST_FILE = "PE_HOSTFILE"
HOST_COUNT = "NHOSTS"
MARKS = ("SGE_ROOT", "SGE_TASK_ID", HOST_FILE)

_START = "mpirun --map-by ppr:1:node launch ..., or qrsh -inherit HOST launch ... for each host"


class GridEngine(Environment):
    name = "grid_engine"
    title = "Grid Engine"
    reads = (JOB_ID, HOST_FILE, HOST_COUNT)
    beware = "NSLOTS counts slots. The host file lies in the spool of the first host."
    start = "mpirun --map-by ppr:1:node LAUNCH"
    source = "https://manpages.debian.org/bookworm/gridengine-client/submit.1.en.html"

    @classmethod
    def detect(cls, place: Place) -> Allocation | None:
        reader = Reader(place.variables)
        if not any(place.variables.get(mark) for mark in MARKS):
            return None
        job_id = reader.text(JOB_ID)
        if job_id is None:
            return None
        hosts = _hosts(place, reader)
        if hosts is None:
            return None
        rank = rank_of(place, hosts, HOST_FILE) if len(hosts) > 1 else 0
        started = started_by_mpi(place.variables)
        unsure = len(hosts) > 1 and rank == 0 and not started
        return Allocation(
            environment=cls.name,
            job_id=job_id,
            node_count=len(hosts),
            node_rank=rank,
            local_rank=local_rank(reader),
            hosts=hosts,
            head=hosts[0],
            warnings=(f"a job script runs on the first host only: start the others too, with {_START}",)
            if unsure
            else (),
            variables=reader.used,
        )


def _hosts(place: Place, reader: Reader) -> tuple[str, ...] | None:
    path = reader.text(HOST_FILE)
    if path is None:  # no parallel environment was asked for
        return (place.hostname,)
    lines = place.lines(path)
    if lines:
        return distinct([line.split()[0] for line in lines])
    if started_by_mpi(place.variables):
        return None
    raise DetectionError(f"{HOST_FILE} is {path}, which cannot be read here", hint="mount it into the container")
