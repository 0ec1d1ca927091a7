"""HTCondor's parallel universe: the same program on every machine, numbered, without a name of the first."""

import re

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader

RANK = "_CONDOR_PROCNO"
COUNT = "_CONDOR_NPROCS"
JOB_AD = "_CONDOR_JOB_AD"

_CLUSTER = re.compile(r"ClusterId\s*=\s*(\d+)")
_HINT = "the parallel universe sets it for every machine: pass _CONDOR_* into the container"


class HtCondor(Environment):
    name = "htcondor"
    precedence = 270
    title = "HTCondor (parallel universe)"
    reads = (RANK, COUNT, JOB_AD)
    caveats = (
        "No variable names the head: set SLIPWAY_HEAD, or SLIPWAY_JOB_DIR to a folder that all machines see. With "
        "dynamic slots two processes may share a machine: request whole machines."
    )
    start = "universe = parallel, machine_count = 2, executable = LAUNCH, environment = SLIPWAY_JOB_DIR=/shared/job"
    source = "https://htcondor.readthedocs.io/en/latest/users-manual/parallel-applications.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        rank = reader.number(RANK)
        if rank is None:
            return None
        count = reader.required_number(COUNT, hint=_HINT)
        path = reader.text(JOB_AD)
        ad = "\n".join(view.lines(path) or ()) if path else ""
        cluster = _CLUSTER.search(ad)
        return Allocation(
            environment=cls.name,
            job_id=f"condor-{cluster[1]}" if cluster else "condor",
            node_count=count,
            node_rank=rank,
            head=view.hostname if count == 1 else None,
            variables=reader.used,
        )
