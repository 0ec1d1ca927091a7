"""The registry of environments, and the choice between those that are there."""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from entrypoints.environments.base import (
    INSIDE,
    MPI,
    NOTHING_RECOGNISED,
    Allocation,
    Environment,
    by_precedence,
)
from entrypoints.environments.explicit import HEAD, NODES, Explicit
from entrypoints.environments.host_names import host_name
from entrypoints.environments.kubernetes.kuberay import ADDRESS, LOCAL, cluster_address
from entrypoints.environments.local_rank import local_rank_conflict, with_local_rank
from entrypoints.environments.mpi.tasks import run_id
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.environments.single import Single
from entrypoints.environments.torchrun import Torchrun
from entrypoints.errors import DetectionError, NodesUnknownError, NotYetThereError

__all__ = ["REGISTRY", "Allocation", "Detection", "Environment", "ProcessView", "detect"]

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

_HOW_TO_HAVE_SEVERAL = (
    "list the nodes with --hosts or SLIPWAY_HOSTS, the head first, or start one task on each with srun, mpirun, … "
    f"(`launch environments` lists all); without --nodes and {NODES} this node runs alone"
)

REGISTRY: tuple[type[Environment], ...] = by_precedence()
"""All environments, in order of precedence: they lie in this folder and its rooms."""


@dataclass(frozen=True, kw_only=True)
class Detection:
    """The winning allocation, and the others that were found."""

    allocation: Allocation
    runners_up: tuple[Allocation, ...]
    conflicts: tuple[str, ...]
    """A sentence for each contradiction between the winner and a runner-up."""


def detect(variables: Mapping[str, str], hostname: str, root: Path = Path("/")) -> Detection:
    """Ask every environment in order; the first that is present wins.

    Raises DetectionError if the environment that should win is malformed: skipping it could start one job per node
    instead of one job over all nodes. Its subclass NotYetThereError is worth another try.
    """
    view = ProcessView(variables=variables, hostname=hostname, root=root)
    if alone := Single.on_purpose(view):
        return Detection(allocation=alone, runners_up=(), conflicts=_existing_cluster(view, alone))
    answers = _answers(view)
    chosen = _choose(answers)
    winner = _as_the_user_says(view, _placed(view, chosen, answers))
    others = [(environment, answer) for environment, answer in answers if environment.name != winner.environment]
    runners_up = tuple(answer for _, answer in others if isinstance(answer, Allocation))
    conflicts = [*_existing_cluster(view, winner)]
    conflicts += local_rank_conflict(winner, variables)
    for environment, answer in others:
        if isinstance(answer, Allocation):
            conflicts += _differences(winner, answer)
            if answer.started_alone and winner.environment == Torchrun.name:  # a script may set its variables itself
                conflicts.append(f"{environment.name}: {answer.started_alone.message}; {winner.environment} wins")
        elif winner.environment != Explicit.name:  # often the reason why the user lists the hosts
            conflicts.append(f"{environment.name} cannot be used ({answer.message}); {winner.environment} wins")
    return Detection(allocation=winner, runners_up=runners_up, conflicts=tuple(conflicts))


Answer = Allocation | DetectionError


def _answers(view: ProcessView) -> list[tuple[type[Environment], Answer]]:
    """The answers of all environments that are present, in order of precedence. Raises NotYetThereError."""
    answers: list[tuple[type[Environment], Answer]] = []
    for environment in REGISTRY:
        if answers and environment.last_resort:
            continue
        try:
            answer = environment.detect(view)
        except NotYetThereError:
            raise
        except DetectionError as error:
            answers.append((environment, error))
        else:
            if answer is not None:
                answers.append((environment, answer))
    return answers


def _choose(answers: list[tuple[type[Environment], Answer]]) -> Allocation:
    """The first answer; or the first complete one of a launcher inside it, if it may be a batch script's.

    Raises DetectionError if that is an error.
    """
    environment, first = answers[0]
    outer = isinstance(first, NodesUnknownError) or (isinstance(first, Allocation) and first.batch_script)
    if outer and environment is not Explicit:
        inner = [answer for inside, answer in answers if inside.precedence >= INSIDE and isinstance(answer, Allocation)]
        # A script may set the variables of a single node.
        if complete := next((answer for answer in inner if not answer.batch_script and answer.node_count > 1), None):
            return complete
    if isinstance(first, DetectionError):
        raise first
    return first


def _placed(view: ProcessView, allocation: Allocation, answers: list[tuple[type[Environment], Answer]]) -> Allocation:
    """The allocation with this process's own place in it.

    Variables may be those of another process, which mpirun passed on. What cannot be passed on decides: this host's
    name among the hosts, else the rank that the MPI launcher gave to this task. A run of `mpirun` on fewer nodes than
    are allocated is the job itself.
    """
    if allocation.environment == Explicit.name or allocation.attach:
        return with_local_rank(allocation, view.variables)
    started = next((answer for by, answer in answers if by.precedence in MPI and isinstance(answer, Allocation)), None)
    here = view.place_in(allocation.hosts or ())
    if started is not None:
        tasks, nodes = started.task_count or started.node_count, allocation.node_count
        if tasks < nodes or started.node_count == 1 < nodes:
            allocation, here = started, None
        elif here is None and started.node_count == nodes:
            here = started.node_rank
    if here is not None and here != allocation.node_rank:
        allocation = replace(allocation, node_rank=here, variables={**allocation.variables, "hostname": view.hostname})
    allocation = replace(allocation, job_id=run_id(view.variables) or allocation.job_id)
    return with_local_rank(allocation, view.variables)


def _existing_cluster(view: ProcessView, winner: Allocation) -> tuple[str, ...]:
    """A sentence if RAY_ADDRESS names a cluster that the winner does not use."""
    address = view.variables.get(ADDRESS, "").strip()
    if not address or winner.attach:
        return ()
    if address == LOCAL:
        return (f"{ADDRESS}={address} names no cluster: this job forms one",)
    return (f"{ADDRESS}={address} names a cluster that exists already; {winner.environment} wins",)


def _as_the_user_says(view: ProcessView, allocation: Allocation) -> Allocation:
    """Apply what the user says: a cluster to attach to, a number of nodes, another name of the head.

    Raises DetectionError if it contradicts the environment, or if the cluster's address is a dashboard's.
    """
    if allocation.environment != Explicit.name:
        allocation = replace(allocation, attach=cluster_address(view.variables) or allocation.attach)
    expected = Reader(view.variables).number(NODES)
    if expected is not None and not allocation.attach and expected != allocation.node_count:
        if allocation.environment == Single.name:
            raise DetectionError(f"{NODES} is {expected}, but {NOTHING_RECOGNISED}", _HOW_TO_HAVE_SEVERAL)
        raise DetectionError(
            f"{NODES} is {expected}, but {allocation.environment} says {allocation.node_count} nodes "
            f"({allocation.reason})",
            hint="unset it, as the environment knows the number, or list the nodes in SLIPWAY_HOSTS",
        )
    text = view.variables.get(HEAD, "").strip()
    if not text or allocation.environment == Single.name or (head := host_name(text, HEAD)) == allocation.head:
        return allocation
    if allocation.hosts is not None and head in allocation.hosts[1:]:
        raise DetectionError(
            f"{HEAD} is {head}, but {allocation.environment} has it as node {allocation.hosts.index(head)}; "
            f"node 0 is {allocation.hosts[0]}",
            hint=f"unset {HEAD}, or list the nodes in the order that you want: --hosts or SLIPWAY_HOSTS",
        )
    return replace(allocation, head=head, other_heads=(), variables={**allocation.variables, HEAD: head})


def _differences(winner: Allocation, other: Allocation) -> list[str]:
    questions = {"node_count": "nodes", "node_rank": "node rank"}  # not the head: it may have several correct names
    return [
        f"{label}: {winner.environment} says {getattr(winner, field)} ({winner.reason}), "
        f"{other.environment} says {getattr(other, field)} ({other.reason}); {winner.environment} wins"
        for field, label in questions.items()
        if getattr(winner, field) != getattr(other, field)
    ]
