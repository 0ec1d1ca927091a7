"""Kubernetes JobSet: Indexed Jobs with pod names `<jobset>-<job>-<job index>-<pod index>.<subdomain>`.

By default the subdomain is the JobSet's name. It tells these pods from those of an Indexed Job called `train-0`.
"""

import re

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.explicit import NODES
from entrypoints.environments.kubernetes.indexed_job import INDEX, SET_THE_SIZE, pod_index, pod_name
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError

NAME = "JOBSET_NAME"
RESTART = "JOBSET_RESTART_ATTEMPT"
PODS_PER_JOB = "SLIPWAY_PODS_PER_JOB"

_POD = re.compile(r"(.+)-(\d+)-(\d+)")


class JobSet(Environment):
    name = "jobset"
    precedence = 540
    title = "Kubernetes JobSet"
    reads = (INDEX, NODES, "host name", NAME, PODS_PER_JOB)
    caveats = "The index counts within one Job of the set. With several Jobs, set SLIPWAY_PODS_PER_JOB."
    start = "command of the replicated Job: LAUNCH   # env SLIPWAY_NODES"
    source = "https://jobset.sigs.k8s.io/docs/concepts/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        index = pod_index(view, reader)
        name, subdomain = pod_name(view, reader)
        match = _POD.fullmatch(name)
        jobset = reader.text(NAME) or (subdomain or "").split(".")[0]
        if index is None or match is None or not jobset or not name.startswith(f"{jobset}-"):
            return None
        job, job_index = match[1], int(match[2])
        if int(match[3]) != index:
            raise DetectionError(f"{INDEX} is {index}, but this pod is called {name}")
        per_job = reader.number(PODS_PER_JOB)
        if job_index > 0 and per_job is None:
            raise DetectionError(
                f"{name} belongs to job {job_index} of the set: its rank depends on the number of pods per job",
                hint=f"set {PODS_PER_JOB} to the Job's completions",
            )
        return Allocation(
            environment=cls.name,
            job_id=f"{jobset}.{view.variables.get(RESTART, '')}",
            node_count=reader.required_number(NODES, hint=SET_THE_SIZE),
            node_rank=job_index * (per_job or 0) + index,
            head=f"{job}-0-0.{subdomain or jobset}",
            variables=reader.used,
        )
