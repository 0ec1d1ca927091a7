"""HTCondor's parallel universe: the same program on every machine, numbered. The job's ad lists the machines."""

import re

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader, distinct

RANK = "_CONDOR_PROCNO"
COUNT = "_CONDOR_NPROCS"
JOB_AD = "_CONDOR_JOB_AD"

_CLUSTER = re.compile(r"^ClusterId\s*=\s*(\d+)", re.MULTILINE)
_MACHINES = re.compile(r"^AllRemoteHosts\s*=\s*\"([^\"]+)\"", re.MULTILINE)
_HINT = "the parallel universe sets it for every machine: pass _CONDOR_* into the container"


class HtCondor(Environment):
    name = "htcondor"
    precedence = 198
    title = "HTCondor (parallel universe)"
    reads = (RANK, COUNT, JOB_AD)
    caveats = (
        "The file in _CONDOR_JOB_AD lists the machines. A container that lacks it needs SLIPWAY_HEAD, or "
        "SLIPWAY_JOB_DIR with a folder that all machines see. Processes on one machine make one node. `condor_q` shows "
        "a job's environment to everyone: pass the token as a file."
    )
    start = (
        "universe = parallel, machine_count = 2, executable = LAUNCH\n"
        "transfer_input_files = token, environment = SLIPWAY_TOKEN_FILE=token"
    )
    source = "https://htcondor.readthedocs.io/en/latest/users-manual/parallel-applications.html"
    run_under = "HTCondor 23.9"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        process = reader.number(RANK)
        if process is None:
            return None
        count = reader.required_number(COUNT, hint=_HINT)
        path = reader.text(JOB_AD)
        ad = "\n".join(view.lines(path) or ()) if path else ""
        cluster = _CLUSTER.search(ad)
        job_id = f"condor-{cluster[1]}" if cluster else "condor"
        machines = _machines(ad)
        if len(machines) != count or process >= count:
            return Allocation(
                environment=cls.name,
                job_id=job_id,
                node_count=count,
                node_rank=process,
                head=view.hostname if count == 1 else None,
                variables=reader.used,
            )
        hosts = distinct(machines)
        return Allocation(
            environment=cls.name,
            job_id=job_id,
            node_count=len(hosts),
            node_rank=hosts.index(machines[process]),
            local_rank=machines[:process].count(machines[process]),
            task_count=count,
            hosts=hosts,
            head=hosts[0],
            variables=reader.used,
        )


def _machines(ad: str) -> tuple[str, ...]:
    """The machine of each process, in order; empty if the ad does not tell them."""
    match = _MACHINES.search(ad)
    return tuple(slot.rpartition("@")[2] for slot in match[1].split(",")) if match else ()
