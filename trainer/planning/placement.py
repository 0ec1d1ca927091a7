"""Assigns roles to devices."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from trainer.cluster.nodes import Slot
from trainer.config.sections.device_mapping import parse_devices
from trainer.config.tree import WorkersConfig
from trainer.errors import ConfigError

ROLES = ("rollout", "actor", "critic", "reference", "teacher", "reward")

# The slots of each role, in the order of its ranks.
Placement = Mapping[str, Sequence[Slot]]


def roles_of(config: WorkersConfig) -> list[str]:
    """The roles that the algorithm needs."""
    unneeded = {
        "critic": not config.needs_critic,
        "reference": not config.needs_reference or config.actor_is_reference,
        "teacher": config.distillation.teacher is None,
    }
    return [role for role in ROLES if not unneeded.get(role)]


def place_roles(config: WorkersConfig, slots: Sequence[Slot], roles: Sequence[str]) -> dict[str, list[Slot]]:
    """The slots of each role in the order of its ranks: those of its mapping, or all. Raises ConfigError."""
    return {role: _mapped(role, getattr(config.device_mapping, role), slots) for role in roles}


def _mapped(role: str, mapping: str | None, slots: Sequence[Slot]) -> list[Slot]:
    if mapping is None:
        return list(slots)
    nodes = list(_by_node(slots).values())
    chosen = []
    for node, device in parse_devices(mapping):
        if node >= len(nodes) or device >= len(nodes[node]):
            there = ", ".join(
                f"node{at} ({on_node[0].node.address}): {len(on_node)}" for at, on_node in enumerate(nodes)
            )
            raise ConfigError(
                f"device_mapping.{role}={mapping}: there is no device {device} of node{node}",
                hint=f"devices of each node: {there}",
            )
        chosen.append(nodes[node][device])
    return chosen


def on_shared_gpus(placement: Placement) -> bool:
    """Whether engines and actor have the same GPUs, so that weights are copied there."""
    actor, engines = (list(placement.get(role, ())) for role in ("actor", "rollout"))
    return bool(actor) and actor == engines and actor[0].device == "cuda"


def engine_slots(config: WorkersConfig, slots: Sequence[Slot]) -> list[list[Slot]]:
    """The slots of each rank of each engine: neighbouring GPUs of a node, or the same node again and again on CPU.

    Raises ConfigError if the model or the GPUs of a node cannot be split that way.
    """
    size = config.rollout.tensor_parallel
    if size == 1 or slots[0].device == "cpu":
        return [[slot] * size for slot in slots]
    engines = []
    for on_node in _by_node(slots).values():
        if len(on_node) % size:
            raise ConfigError(
                f"rollout.tensor_parallel={size} does not divide the {len(on_node)} GPUs of the rollout engines on "
                f"{on_node[0].node.address}",
                hint="set it to a divisor of the GPUs that every node has for them: an engine stays within a node",
            )
        engines += [on_node[first : first + size] for first in range(0, len(on_node), size)]
    return engines


def _by_node(slots: Sequence[Slot]) -> dict[str, list[Slot]]:
    nodes: dict[str, list[Slot]] = defaultdict(list)
    for slot in slots:
        nodes[slot.node.id].append(slot)
    return nodes
