"""The rank of this process on its node. Launchers start several processes per node, inside any other environment."""

from collections.abc import Mapping
from dataclasses import replace

from entrypoints.environments.base import Allocation
from entrypoints.environments.explicit import Explicit
from entrypoints.environments.mpi.tasks import LOCAL_RANK
from entrypoints.environments.process_view import Reader

OF_LAUNCHERS = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK", *LOCAL_RANK)
"""Launchers run inside every other environment. The innermost, torchrun, comes first."""
OF_MANAGERS = {"flux": "FLUX_TASK_LOCAL_ID", "slurm": "SLURM_LOCALID", "lsf": "JSM_NAMESPACE_LOCAL_RANK"}
"""By environment: inside the job of another manager they are left over from the job around it."""
_ELASTIC, _WORKERS = "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"
"""Set by torchrun for its workers."""


def with_local_rank(allocation: Allocation, variables: Mapping[str, str]) -> Allocation:
    """The allocation with this process's rank on its node: above 0 if any launcher around it says so.

    Only the process with local rank 0 forms Ray, so there must be one of them per node. Raises DetectionError if a
    variable is no number.
    """
    reader = Reader(variables)
    ranks = {name: reader.number(name) or 0 for name in _names(allocation.environment)}
    if variables.get(_ELASTIC):
        tasks = allocation.task_count or allocation.node_count
        allocation = replace(allocation, task_count=tasks * (reader.number(_WORKERS) or 1))
    deciding = next((name for name, rank in ranks.items() if rank), None)
    if allocation.local_rank > 0 or deciding is None:
        return allocation
    used = {**allocation.variables, deciding: variables[deciding]}
    return replace(allocation, local_rank=ranks[deciding], variables=used)


def local_rank_conflict(allocation: Allocation, variables: Mapping[str, str]) -> list[str]:
    """A sentence if the variables disagree, as they do inside each other."""
    ranks = {
        name: rank for name in _names(allocation.environment) if (rank := Reader(variables).number(name)) is not None
    }
    if len(set(ranks.values())) < 2:
        return []
    told = ", ".join(f"{name} says {rank}" for name, rank in ranks.items())
    return [f"local rank: {told}; only the process with 0 in all of them leads its node"]


def local_rank_variable(variables: Mapping[str, str]) -> str | None:
    """The variable that says that this process is not the first of its node; None if none does."""
    return next((name for name in _names(Explicit.name) if Reader(variables).number(name)), None)


def _names(environment: str) -> tuple[str, ...]:
    if environment == Explicit.name:
        return (*OF_LAUNCHERS, *OF_MANAGERS.values())
    manager = OF_MANAGERS.get(environment)
    return (*OF_LAUNCHERS, manager) if manager else OF_LAUNCHERS
