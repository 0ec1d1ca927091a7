"""The registry of environments, and the choice between those that are there."""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from entrypoints.environments.base import Allocation, Environment, by_precedence
from entrypoints.environments.explicit import HEAD, NODES, Explicit
from entrypoints.environments.kubernetes.kuberay import ADDRESS, cluster_address
from entrypoints.environments.process_view import ProcessView
from entrypoints.environments.single import Single
from entrypoints.errors import DetectionError, NotYetThereError

__all__ = ["REGISTRY", "Allocation", "Detection", "Environment", "ProcessView", "detect"]

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

REGISTRY: tuple[type[Environment], ...] = by_precedence()
"""All environments, in order of precedence: each module of this folder and its rooms defines at most one."""


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
    winner: Allocation | None = None
    runners_up: list[Allocation] = []
    conflicts: list[str] = []
    for environment in REGISTRY:
        if winner is not None and environment.last_resort:
            continue
        try:
            found = environment.detect(view)
        except NotYetThereError:
            raise
        except DetectionError as error:
            if winner is None:
                raise
            if winner.environment == Explicit.name:
                continue  # often the reason why the user lists the hosts
            conflicts.append(f"{environment.name} cannot be used ({error.message}); {winner.environment} wins")
            continue
        if found is None:
            continue
        if winner is None:
            winner = _as_the_user_says(view, found)
            conflicts += _existing_cluster(view, winner)
        else:
            runners_up.append(found)
            conflicts += _differences(winner, found)
    assert winner is not None, "the last environment is always present"
    return Detection(allocation=winner, runners_up=tuple(runners_up), conflicts=tuple(conflicts))


def _existing_cluster(view: ProcessView, winner: Allocation) -> tuple[str, ...]:
    """A sentence if RAY_ADDRESS names a cluster that the winner does not use."""
    address = view.variables.get(ADDRESS)
    if not address or winner.attach:
        return ()
    return (f"{ADDRESS}={address} names a cluster that exists already; {winner.environment} wins",)


def _as_the_user_says(view: ProcessView, found: Allocation) -> Allocation:
    """Apply what the user says: a cluster to attach to, a number of nodes, another name of the head.

    Raises DetectionError if it contradicts the environment, or if the cluster's address is a dashboard's.
    """
    if found.environment != Explicit.name:
        found = replace(found, attach=cluster_address(view.variables) or found.attach)
    expected = view.variables.get(NODES, "").strip()
    if expected and not found.attach and expected != str(found.node_count):
        raise DetectionError(
            f"{NODES} is {expected}, but {found.environment} says {found.node_count} nodes ({found.reason})",
            hint="unset it, as the environment knows the number, or list the nodes in SLIPWAY_HOSTS",
        )
    head = view.variables.get(HEAD, "").strip()
    if not head or head == found.head or found.environment == Single.name:
        return found
    if found.hosts is not None and head in found.hosts[1:]:
        raise DetectionError(
            f"{HEAD} is {head}, but {found.environment} has it as node {found.hosts.index(head)}; "
            f"node 0 is {found.hosts[0]}",
            hint=f"unset {HEAD}, or list the nodes in the order that you want: --hosts or SLIPWAY_HOSTS",
        )
    return replace(found, head=head, other_heads=(), variables={**found.variables, HEAD: head})


def _differences(winner: Allocation, other: Allocation) -> list[str]:
    questions = {"node_count": "nodes", "node_rank": "node rank"}  # not the head: it may have several correct names
    return [
        f"{label}: {winner.environment} says {getattr(winner, field)} ({winner.reason}), "
        f"{other.environment} says {getattr(other, field)} ({other.reason}); {winner.environment} wins"
        for field, label in questions.items()
        if getattr(winner, field) != getattr(other, field)
    ]
