"""The registry of environments, and the choice between those that are there."""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from entrypoints.environments.base import Allocation, Environment, by_precedence
from entrypoints.environments.explicit import HEAD, NODES, Explicit
from entrypoints.environments.kuberay import ADDRESS
from entrypoints.environments.process_view import ProcessView
from entrypoints.errors import DetectionError, NotYetThereError

__all__ = ["REGISTRY", "Allocation", "Detection", "Environment", "ProcessView", "detect"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

REGISTRY: tuple[type[Environment], ...] = by_precedence()
"""All environments, in order of precedence: each module of this folder defines at most one."""


@dataclass(frozen=True, kw_only=True)
class Detection:
    """The allocation that won, and what else was seen."""

    allocation: Allocation
    runners_up: tuple[Allocation, ...]
    conflicts: tuple[str, ...]
    """Where a runner-up says something else, as sentences."""


def detect(variables: Mapping[str, str], hostname: str, root: Path = Path("/")) -> Detection:
    """Ask every environment, in order; the first that is there wins.

    Raises DetectionError if the environment that should win is malformed: falling through to the next one could start
    one job per node where one job over all nodes was meant. NotYetThereError, one of them, is worth another try.
    """
    view = ProcessView(variables=variables, hostname=hostname, root=root)
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
                continue  # often the reason why the user says it all
            conflicts.append(f"{environment.name} cannot be used ({error.message}); {winner.environment} wins")
            continue
        if found is None:
            continue
        if winner is None:
            winner = _as_the_user_says(view, found)
            if address := view.variables.get(ADDRESS) if not winner.attach else None:
                conflicts.append(f"{ADDRESS}={address} names a cluster that exists already; {winner.environment} wins")
        else:
            runners_up.append(found)
            conflicts += _differences(winner, found)
    assert winner is not None, "the last environment is always there"
    return Detection(allocation=winner, runners_up=tuple(runners_up), conflicts=tuple(conflicts))


def _as_the_user_says(view: ProcessView, found: Allocation) -> Allocation:
    """Attach where the user names a cluster and no hosts, name the head where the environment cannot, and compare the
    number of nodes with what was asked for."""
    if found.environment != Explicit.name:
        found = replace(found, attach=view.variables.get(ADDRESS) or found.attach)
    expected = view.variables.get(NODES, "").strip()
    if expected and not found.attach and expected != str(found.node_count):
        raise DetectionError(
            f"{NODES} is {expected}, but {found.environment} says {found.node_count} nodes ({found.reason})",
            hint="leave it unset where the environment knows the number, or list the nodes in SLIPWAY_HOSTS",
        )
    head = view.variables.get(HEAD, "").strip()
    if found.hosts is not None or not head:
        return found
    return replace(found, head=head, other_heads=(), variables={**found.variables, HEAD: head})


def _differences(winner: Allocation, other: Allocation) -> list[str]:
    questions = {"node_count": "nodes", "node_rank": "node rank"}  # a head may be spelled in several right ways
    return [
        f"{label}: {winner.environment} says {getattr(winner, field)} ({winner.reason}), "
        f"{other.environment} says {getattr(other, field)} ({other.reason}); {winner.environment} wins"
        for field, label in questions.items()
        if getattr(winner, field) != getattr(other, field)
    ]
