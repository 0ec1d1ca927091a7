"""The base class of environments, and the allocation that they return."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from entrypoints.environments.process_view import ProcessView
from entrypoints.errors import DetectionError
from entrypoints.logs import quoted

INSIDE = 300
"""Environments from this precedence on may run inside the job of an earlier one."""
MPI = range(390, 500)
"""The precedence of environments that number the tasks of an MPI launcher."""
NOTHING_RECOGNISED = "no scheduler, launcher or service is recognised"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One environment's answer: the job's nodes, this process's place among them, and the variables that told it."""

    environment: str
    job_id: str
    """Equal on every node of the job, different between jobs."""
    node_count: int
    node_rank: int
    local_rank: int = 0
    """The rank of this task on its node. Only task 0 forms Ray; the others wait."""
    task_count: int | None = None
    """The number of tasks on all nodes together; None if unknown."""
    hosts: tuple[str, ...] | None = None
    """The hosts in order of rank; None if the environment names only the head."""
    head: str | None
    """Name or address of node rank 0 that its peers can resolve; None if the environment does not tell it."""
    other_heads: tuple[str, ...] = ()
    """Further names or addresses of the head; some nodes may reach only some of them."""
    attach: str | None = None
    """The address of an existing Ray cluster to use instead of forming one."""
    batch_script: bool = False
    """Whether this may be the only process of the allocation so far, as a batch script is."""
    alone: str = ""
    """The command that starts one task on every node, if this process certainly is the only one so far; else empty."""
    warnings: tuple[str, ...] = ()
    variables: Mapping[str, str]
    """The variables that decided, with their values."""

    def __post_init__(self) -> None:
        if self.node_count < 1:
            raise DetectionError(f"{self.environment}: the number of nodes is {self.node_count}, not at least 1")
        if not 0 <= self.node_rank < self.node_count:
            raise DetectionError(f"{self.environment}: node rank {self.node_rank} is not below {self.node_count} nodes")
        if self.local_rank < 0:
            raise DetectionError(f"{self.environment}: local rank {self.local_rank} is negative")
        if self.hosts is not None and len(self.hosts) != self.node_count:
            raise DetectionError(
                f"{self.environment}: {len(self.hosts)} hosts are listed for {self.node_count} nodes",
                hint=f"they come from {self.reason}",
            )

    @property
    def is_head(self) -> bool:
        """Whether this task leads the job."""
        return self.node_rank == 0 and self.local_rank == 0

    @property
    def reason(self) -> str:
        """The deciding variables as `NAME=value`."""
        return " ".join(f"{name}={quoted(value)}" for name, value in self.variables.items()) or NOTHING_RECOGNISED

    @property
    def started_alone(self) -> DetectionError | None:
        """The error when only this node's task was started, else None."""
        if not self.alone:
            return None
        if self.node_count == 1:
            problem = f"{self.head} is allocated, but this process runs on another host"
        elif self.node_rank > 0:
            problem = f"this is node {self.node_rank} of {self.node_count}, but nothing says what started this process"
        else:
            problem = f"{self.node_count} nodes are allocated, but only this process was started"
        return DetectionError(problem, hint=f"write {self.alone}, or --single for this node alone")

    @property
    def heads(self) -> tuple[str, ...]:
        """All names and addresses of the head, the likeliest first. Raises DetectionError if there is none."""
        if self.head is None:
            raise DetectionError(
                f"{self.environment} does not name the head of {self.node_count} nodes ({self.reason})",
                hint="set SLIPWAY_HEAD on each node (mpiexec -genv SLIPWAY_HEAD $(hostname)), or use a SLIPWAY_JOB_DIR",
            )
        return (self.head, *self.other_heads)

    def host(self, rank: int) -> str | None:
        """The host of a rank; None if unknown."""
        if self.hosts is not None:
            return self.hosts[rank]
        return self.head if rank == 0 else None


class Environment(ABC):
    """A scheduler, launcher or service that tells a process its job's nodes.

    Each subclass is a file of this folder, or a row of `services/table.py` or `schedulers/node_file.py`. The registry
    lists them by itself.
    """

    name: ClassVar[str]
    precedence: ClassVar[int]
    """The position in the order of detection, lowest first. No two environments share a number.

    | from | kind |
    | --- | --- |
    | 100 | what the user says, and Ray clusters that exist already |
    | 190 | resource managers that run inside the job of another one |
    | 200 | resource managers: they know all nodes of the job |
    | 300 | managed services: they name the head, which the launchers below them often do not |
    | 400 | MPI launchers: they know what they started; those that set others' variables come first |
    | 500 | Kubernetes' controllers, specific ones first, because most are built from Indexed Jobs |
    | 600 | variables that all of the above and their hooks may also set |
    | 900 | one node |
    """
    last_resort: ClassVar[bool] = False
    """Whether it is asked only if no other environment is present."""
    job_id_variable: ClassVar[str] = ""
    """A scheduler's variable with the job's id, which is equal on all nodes."""
    array_index_variable: ClassVar[str] = ""
    """The variable with the index in a job array: its elements share the job's id and run side by side."""
    title: ClassVar[str]
    """Its usual name."""
    reads: ClassVar[tuple[str, ...]]
    """The deciding variables and files, for the documentation."""
    caveats: ClassVar[str]
    """Common misreadings of its variables, and limits of its detection."""
    start: ClassVar[str]
    """A command that starts one task on every node; LAUNCH stands for `launch …` in the image."""
    source: ClassVar[str]
    """The page that documents its variables."""

    run_under: ClassVar[str] = ""
    """The real system under which tests start `launch`; empty if tests use recorded variables only."""

    @classmethod
    def scheduler_job_id(cls, variables: Mapping[str, str]) -> str | None:
        """The scheduler's job id, with the index in an array; None without a job of this scheduler."""
        job_id = variables.get(cls.job_id_variable)
        if not job_id:
            return None
        index = variables.get(cls.array_index_variable, "")
        return f"{job_id}.{index}" if index.isdigit() and index != "0" else job_id

    @classmethod
    @abstractmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        """The allocation, or None if this environment is not present.

        Raises DetectionError if it is present but its variables are malformed or lack this node's identity.
        """


def by_precedence() -> tuple[type[Environment], ...]:
    """All environments, in the order of detection."""
    classes = (
        *Environment.__subclasses__(),
        *(row for table in Environment.__subclasses__() for row in table.__subclasses__()),
    )
    return tuple(sorted((kind for kind in classes if hasattr(kind, "name")), key=lambda kind: kind.precedence))


def scheduler_job_id(variables: Mapping[str, str]) -> str | None:
    """The id of the scheduler's job around this process. Unlike the launchers' own ids it is equal on all nodes."""
    job_ids = (environment.scheduler_job_id(variables) for environment in by_precedence())
    return next((job_id for job_id in job_ids if job_id is not None), None)
