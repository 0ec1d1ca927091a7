"""What every environment answers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from entrypoints.environments.process_view import ProcessView
from entrypoints.errors import DetectionError


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What one environment says about this job, and where it read that."""

    environment: str
    job_id: str
    """Equal on every node of the job, different between jobs."""
    node_count: int
    node_rank: int
    local_rank: int = 0
    """Several tasks may run on one node; only task 0 forms Ray, the others wait."""
    task_count: int | None = None
    """Tasks on all nodes together, where the environment says so."""
    hosts: tuple[str, ...] | None = None
    """In order of rank; None where the environment names only the head."""
    head: str | None
    """Name or address of node rank 0, as its peers can resolve it; None where the environment does not say."""
    other_heads: tuple[str, ...] = ()
    """Further names or addresses of the head: not every one may be reachable from every node."""
    attach: str | None = None
    """The address of a Ray cluster that exists already and is to be used instead of forming one."""
    alone: str = ""
    """The line that starts one task on every node, if this process is certainly the only one that was started."""
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
        return self.node_rank == 0 and self.local_rank == 0

    @property
    def reason(self) -> str:
        """The deciding variables as a person would write them."""
        return " ".join(f"{name}={value}" for name, value in self.variables.items()) or "nothing else is set"

    @property
    def all_warnings(self) -> tuple[str, ...]:
        if not self.alone or self.attach:
            return self.warnings
        return (f"{self.node_count} nodes are allotted, but only this process was started: write {self.alone}",
                *self.warnings)  # fmt: skip

    @property
    def heads(self) -> tuple[str, ...]:
        """All names and addresses of the head, the likeliest first. Raises DetectionError where there are none."""
        if self.head is None:
            raise DetectionError(
                f"{self.environment} names no head for {self.node_count} nodes ({self.reason})",
                hint="set SLIPWAY_HEAD everywhere (mpiexec -genv SLIPWAY_HEAD $(hostname)), or share a SLIPWAY_JOB_DIR",
            )
        return (self.head, *self.other_heads)

    def host(self, rank: int) -> str | None:
        """The name of a node, where the environment knows it."""
        if self.hosts is not None:
            return self.hosts[rank]
        return self.head if rank == 0 else None


class Environment(ABC):
    """One way in which nodes learn of each other. Each subclass is one file of this folder, found by itself."""

    name: ClassVar[str]
    precedence: ClassVar[int]
    """Its place in the order of detection, lowest first. No two environments share a number.

    | from | kind |
    | --- | --- |
    | 100 | what the user says, and Ray clusters that exist already |
    | 200 | resource managers: they know all nodes of the job |
    | 300 | managed services: they name the head, which the launchers below them often do not |
    | 400 | MPI launchers: they know what they started; those that set others' variables come first |
    | 500 | Kubernetes' controllers, the more specific ones first: most are built from Indexed Jobs |
    | 600 | variables that all of the above, and their hooks, may also set |
    | 900 | one node |
    """
    last_resort: ClassVar[bool] = False
    """Whether it is asked only if no other environment is there."""
    job_id_variable: ClassVar[str] = ""
    """A scheduler's variable with the job's id, which is equal on all nodes."""
    array_index_variable: ClassVar[str] = ""
    """The variable with the index in a job array: its elements share the job's id and run side by side."""
    title: ClassVar[str]
    """What people call it."""
    reads: ClassVar[tuple[str, ...]]
    """The variables and files that decide, for the documentation."""
    beware: ClassVar[str]
    """What its variables do not mean, though one might think so."""
    start: ClassVar[str]
    """A line that starts one task on every node; LAUNCH stands for `launch …` in the image."""
    source: ClassVar[str]
    """Where its variables are documented."""

    run_under: ClassVar[str] = ""
    """The real system under which tests start `launch`; else only its recorded or documented variables are known."""

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
        """Return what this environment says, or None where it is not there.

        Raises DetectionError where it is there but its variables are malformed or lack this node's identity.
        """


def by_precedence() -> tuple[type[Environment], ...]:
    """All environments, in the order of detection."""
    return tuple(sorted(Environment.__subclasses__(), key=lambda environment: environment.precedence))


def scheduler_job_id(variables: Mapping[str, str]) -> str | None:
    """The id of the scheduler's job around this process. Unlike the launchers' own ids it is equal on all nodes."""
    found = (environment.scheduler_job_id(variables) for environment in by_precedence())
    return next((job_id for job_id in found if job_id is not None), None)
